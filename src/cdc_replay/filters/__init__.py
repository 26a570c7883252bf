"""Row filters, exactly: in Spark where that gives PostgreSQL's answer, else by PostgreSQL."""
