"""Capture of the publisher's DDL: event triggers, their messages, and the catalog history."""
