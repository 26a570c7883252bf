"""CDC replay for PostgreSQL: one logical slot, one durable change log, any number of subscriptions."""
