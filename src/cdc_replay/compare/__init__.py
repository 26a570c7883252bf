"""Make a subscriber hold exactly the filtered state of one LSN, moving little more than what differs.

A changed row filter or column list sends nothing (R9.12). A full copy repairs that, and moves the whole
table; here both servers first find out for themselves what can differ:

    publisher, under an exported snapshot           subscriber
    ------------------------------------------------------------------------------------------
    digests of 4096 buckets of the key's hash  ──▶  the same of its table      (`buckets`)
    unequal buckets, split again and again     ──▶  the same                   until few rows are in each
    the rows of those buckets, by COPY         ──▶  temporary tables           (`staging`)
                                                    begin, lock the tables
                                                      compare row by row, delete, update, insert (`merge`)
                                                      every table `Ready(consistent point)`
                                                    commit

What is moved is then in proportion to what differs: the digests of the first level (at most about 300 kB of
each side), and for a row that differs the digests on the way to its bucket and the few rows that share it.
Above `buckets.MOST_BUCKETS` unequal buckets, splitting ends and the neighbours of each are more.

Rows of the subscriber that the row filter shuts out need no row of the publisher to be found: where the
subscriber can evaluate the filter, they take no part in its digests, and are surplus when rows are compared.
That is right even if the two servers disagree about a row: if the publisher has it after all, its bucket is
unequal.

Why not by ranges of the key, which an index could answer: the two servers may sort texts differently, and a
table may have no key. Hashes of texts are the same everywhere (`cdc_replay.compare.digest` says why), and
cost each server one pass over the table per level.

Why nothing is replayed first: a table is compared as it is, and becomes what the initial copy of a new
subscription would bring at the consistent point (R7.3-R7.6). What it lacked because it was behind is part of
the difference, and so is what a refused change or a rewritten table left undone. So a parked table is
repaired too, and the result does not depend on how the rows came to be.

Values of a rewritten table alone (R11.9) are compared by the same digests, where both sides are at one LSN
(`compare_values`): rows of one key are updated, all others stay, and are counted.

A table without key is a multiset of whole rows. Otherwise a row of both sides is updated in place, so that
columns of the subscriber's own survive.

Writers of the subscriber other than this software are shut out only while the rows are merged. One that
writes while the digests are taken may keep what it wrote, as it may when it writes afterwards; nothing else
suffers.

Killed before the commit, nothing has changed: staging is a session's temporary tables. Killed behind it, all
is done. The caller holds the subscription's lock throughout.
"""
