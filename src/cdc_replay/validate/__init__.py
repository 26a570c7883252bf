"""Prove that a subscriber holds what the publications say that it should.

`fence` opens both sides at one WAL position, `comparison` finds how they differ, `suites` and `expectations`
let Great Expectations judge that, `report` runs it and writes what people read.

Great Expectations takes seconds to import: import `report`, `suites` and `expectations` where they are used,
not at the top of a module that every command loads.
"""
