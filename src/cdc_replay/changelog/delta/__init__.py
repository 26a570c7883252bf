"""The Delta table of the change log: actions, commits and checkpoints, each durable."""
