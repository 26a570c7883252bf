"""What the publications mean for one subscription: pure functions of the catalog."""
