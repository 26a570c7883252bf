"""Counts with their noun."""

from __future__ import annotations


def count_in_words(count: int, noun: str) -> str:
    """Such as `1 row` or `1,100 rows`; `noun` is a singular whose plural ends in s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def rows_differ(count: int) -> str:
    """Such as `1 row differs` or `1,100 rows differ`."""
    return f"{count_in_words(count, 'row')} {'differs' if count == 1 else 'differ'}"
