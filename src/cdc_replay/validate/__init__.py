"""Prove that a subscriber holds what the publications publish.

`at_fence` opens both sides at one WAL position, `compare.comparison` finds the differences, `suites` and
`expectations` let Great Expectations judge them, `run` runs it and writes the reports.

Great Expectations takes seconds to import: import `run`, `suites` and `expectations` where they are used, not
at the top of a module that every command loads.
"""
