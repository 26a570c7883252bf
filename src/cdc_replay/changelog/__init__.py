"""The durable copy of the change stream."""
