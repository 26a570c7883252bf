"""Spark sessions, their Java, and their workers."""
