"""Plain values that every stage shares. Standard library only."""
