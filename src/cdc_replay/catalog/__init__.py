"""The publisher's catalog: publications and tables, read and versioned by WAL position."""
