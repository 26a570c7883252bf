"""The only code that opens connections to PostgreSQL."""
