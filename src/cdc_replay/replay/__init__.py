"""The engine: one window of the change log into many subscribers."""
