"""`plan`: what a proposed CREATE, ALTER or DROP PUBLICATION would do, before it is executed.

script (a file) → tokens → statements       only the three commands, each written anew from its tokens
statements → catalogs                       a PostgreSQL executes them in a transaction that it rolls back:
                                            the publisher, or a throw-away server (`publisher`, `elsewhere`)
catalogs, present and proposed → effects    rows counted on the publisher, changes counted in the log,
                                            what PostgreSQL would refuse now or later
"""
