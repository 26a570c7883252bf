"""What DDL on the publisher tells the log."""
