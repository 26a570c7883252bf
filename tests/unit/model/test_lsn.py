"""WAL positions read and print as PostgreSQL's pg_lsn does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc_replay.errors import InvalidLsn
from cdc_replay.model.lsn import Lsn, Window


@given(st.integers(min_value=0, max_value=2**64 - 1))
def test_text_and_value_are_the_same_position(value: int) -> None:
    assert Lsn.parse(str(Lsn(value))) == Lsn(value)


def test_text_equals_that_of_the_server() -> None:
    assert str(Lsn(0x16_B374D848)) == "16/B374D848"
    assert Lsn.parse("0/16b3748") == Lsn(0x16B3748)
    assert Lsn(0x16_B374D848).file_name == "16-B374D848"


@pytest.mark.parametrize("text", ["", "0", "0/", "/0", "0/123456789", "x/0", "-1/0", "0/0 0"])
def test_invalid_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidLsn, match="invalid WAL position"):
        Lsn.parse(text)


def test_window_excludes_its_start_and_includes_its_end() -> None:
    window = Window(Lsn(10), Lsn(20))

    assert [lsn for lsn in (10, 11, 20, 21) if Lsn(lsn) in window] == [11, 20]
    assert not window.is_empty
    assert Window(Lsn(20), Lsn(20)).is_empty
