"""Net changes to subscriber rows, one transaction per window (spec section 8)."""
