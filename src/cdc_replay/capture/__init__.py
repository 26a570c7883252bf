"""Slot → change log: what the publisher needs, one durable pull after the other (spec sections 1, 9)."""
