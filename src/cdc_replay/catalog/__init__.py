"""What the publisher says: its publications and tables, read and kept by WAL position."""
