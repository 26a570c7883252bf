"""What a server says cannot steer the terminal, or write a log line of its own."""

from __future__ import annotations

import logging

import pytest

from cdc_replay.model.printable import LogLineFormatter, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("orders", "orders"),
        ("two\nlines", "two\nlines"),
        ("\x1b[31mred\x1b]0;title\x07", "\\x1b[31mred\\x1b]0;title\\x07"),
        ("a\rb\u202e\ud800", "a\\rb\\u202e\\ud800"),
        ("a\u2028b\u2029c\x85", "a\\u2028b\\u2029c\\x85"),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_log_line_that_a_name_forges_is_part_of_the_line() -> None:
    name = "t\n2026-01-01 00:00:00,000 WARNING forged\x1b[2J"
    record = logging.LogRecord("n", logging.INFO, "f", 1, "table %s: 1 row", (name,), None)
    lines = LogLineFormatter("%(levelname)s %(message)s").format(record).splitlines()
    assert lines == ["INFO table t", "    2026-01-01 00:00:00,000 WARNING forged\\x1b[2J: 1 row"]
