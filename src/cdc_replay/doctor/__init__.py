"""What `doctor` checks: this machine, the change log, both sides."""
