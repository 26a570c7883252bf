"""Row filters, exactly: in Arrow where that gives PostgreSQL's answer, else by PostgreSQL."""
