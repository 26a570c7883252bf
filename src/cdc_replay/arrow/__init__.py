"""Vectorised helpers over Arrow arrays."""
