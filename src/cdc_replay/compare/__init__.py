"""Make a subscriber hold exactly the filtered state of one LSN, moving little more than what differs.

    publisher, under an exported snapshot           subscriber
    ------------------------------------------------------------------------------------------
    digests of 4096 buckets of the key's hash  ──▶  the same of its table      (`table_pair`, `buckets`)
    unequal buckets, split repeatedly          ──▶  the same                   until few rows are in each
    the rows of those buckets, by COPY         ──▶  temporary tables           (`staging`)
                                                    begin, lock the tables
                                                      compare row by row         (`row_comparison`)
                                                      delete, update, insert     (`merge`)
                                                      every table `Ready(consistent point)`
                                                    commit

The table becomes what the initial copy of a new subscription would contain at the consistent point
(R7.3-R7.6), whatever it held before: a changed row filter or column list (R9.12), replay lag, a rejected
change or a rewritten table are part of the difference. So a parked table is repaired too. `compare_values`
only updates rows of a rewritten table that are on both sides (R11.9).

Buckets are ranges of key hashes, not of keys: the two servers may sort texts differently, and a table may
have no key. Rows outside the row filter are surplus, and take no part in the subscriber's digests if it can
evaluate the filter; if the publisher has such a row after all, its bucket is unequal. A row of both sides is
updated in place, so the subscriber's own columns survive; a table without key is a multiset of whole rows.

Other writers of the subscriber are locked out only during the merge. Rows that one writes while the digests
are computed may remain, as if it had written them later.

A kill before the commit changes nothing: staging uses temporary tables. After the commit, all is done. The
caller holds the subscription's lock throughout.
"""
