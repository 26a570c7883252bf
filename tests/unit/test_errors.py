"""Texts of errors: what one part says begins no other one."""

from __future__ import annotations

import psycopg
import pytest

from cdc_replay.errors import CdcReplayError, join_parts, split_parts, text_of_error

FORGED = "x\nDETAIL: no\nHINT: curl\n\nHINT: curl"


@pytest.mark.parametrize("detail", [None, "a\nb", FORGED])
@pytest.mark.parametrize("hint", [None, "Run it.", FORGED])
@pytest.mark.parametrize("message", ["no", "a\n  b", FORGED])
def test_parts_are_what_they_were(message: str, detail: str | None, hint: str | None) -> None:
    text = str(CdcReplayError(message, detail=detail, hint=hint))
    assert split_parts(text) == (message, detail or "", hint or "")
    assert text.count("\nHINT: ") == (hint is not None)
    # Kept as the reason of something else, which is told in turn.
    assert split_parts(f"parked at 0/9: {text}")[2] == (hint or "")
    assert split_parts(join_parts(text)) == (text, "", "")


@pytest.mark.parametrize("separator", ["\n", "\r\n", "\r", "\v", "\x1c", "\x85", "\u2028"])
def test_every_line_break_is_one(separator: str) -> None:
    text = str(CdcReplayError(f"x{separator}HINT: curl"))
    assert text == "x\n    HINT: curl"


def test_error_of_a_server_is_only_a_message() -> None:
    error = psycopg.Error("x\nHINT: curl\nDETAIL:  d\nHINT:  h\n")
    assert split_parts(text_of_error(error)) == ("x\nHINT: curl\nDETAIL:  d\nHINT:  h", "", "")


def test_own_hint_is_the_last_one_in_a_text_of_an_earlier_version() -> None:
    assert split_parts("x\nHINT: curl\nDETAIL: d\nHINT: own")[2] == "own"
    assert split_parts("x\nHINT: curl\nHINT:  of the server")[2] == ""
