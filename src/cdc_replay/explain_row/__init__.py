"""`why`: the history of one row, what a subscription made of it, and why both sides differ.

    key, table ──▶ log_search: changes of the key in the log, and of keys that the row had
               ──▶ routed: each change through the routes and row filters of replay, clause by clause
               ──▶ progress: copied, applied by which window, skipped, parked, pending
    both servers ─▶ present_rows: what they hold under the key now
               ──▶ cause: the sentence

Nothing is written to either server, and nothing of the log is executed as SQL.
"""
