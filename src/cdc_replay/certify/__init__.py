"""Certify a subscription: a native one, on a throw-away server, is the judge.

    publisher ──┬─▶ change log ─▶ replay ─▶ our subscriber ──────────┐
                └─▶ CREATE SUBSCRIPTION on a throw-away PostgreSQL ──┴─▶ compare at one LSN

| step                | module            | what                                                             |
|---------------------|-------------------|------------------------------------------------------------------|
| what native needs   | `native_tables`   | plain copies of our tables: columns and keys, no code of anybody |
| slots on publisher  | `publisher_slots` | headroom, names, the lock that tells leftovers, removal          |
| subscribe           | `native_side`     | the throw-away subscription: copied, stopped at an LSN, resumed  |
| follow              | `run`             | both follow; ours by capture and replay, or whoever else does    |
| one position        | `at_fence`        | native is stopped, ours is replayed to exactly where it stopped  |
| compare             | `tables`          | each table, by the comparison that validation uses               |
| explain             | `deviations`      | rows that differ by a documented deviation; all others fail      |
| report              | `page`            | the HTML page                                                    |

Native replication cannot be told to stop at an LSN, but replay can: so native is disabled, and what it has
applied is the fence.

Everything is thrown away at the end. After a kill the server and its files go with the process
(`postgres.throwaway_server`); its slots stay on the publisher until the next run, which names them.
"""
