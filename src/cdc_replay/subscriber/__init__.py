"""The target side: the subscriber's tables, and what it knows about its subscriptions."""
