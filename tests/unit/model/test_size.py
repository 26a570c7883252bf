"""Sizes are read and written as PostgreSQL does."""

from __future__ import annotations

import pytest

from cdc_replay.model.size import parse_size, size_in_words


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("16kB", 16 << 10),
        (" 512 MB ", 512 << 20),
        ("50GB", 50 << 30),
        ("1TB", 1 << 40),
    ],
)
def test_size_has_the_units_of_postgresql(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "-1", "50gb", "1.5GB", "GB", "1 GB more", "1" * 19])
def test_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 bytes"),
        (10239, "10239 bytes"),
        (10240, "10 kB"),
        (16 << 20, "16 MB"),
        ((16 << 20) + (600 << 10), "17 MB"),
        (50 << 30, "50 GB"),
        (20_000 << 40, "20000 TB"),
    ],
)
def test_size_is_printed_in_the_most_readable_unit(size_bytes: int, text: str) -> None:
    assert size_in_words(size_bytes) == text
