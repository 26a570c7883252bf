"""Any input is decoded or rejected with InvalidMessage: no crash, no hang, no guess."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from cdc_replay.errors import InvalidMessage
from cdc_replay.pgoutput.kernels import Fault
from cdc_replay.pgoutput.reader import decode
from unit.pgoutput.examples import messages
from unit.pgoutput.hostile import SEED, check_row_changes, reference
from unit.pgoutput.mutation import mutants
from unit.pgoutput.wire import encode

FORMS = [(False, False), (True, False), (False, True), (True, True)]
"""Inside a streamed block or not (R1.9), with `streaming = parallel` or not (R1.3)."""

OUTCOMES = {fault.name for fault in Fault if fault} | {"accepted", "not_utf8"}


def test_damaged_row_changes_are_rejected_exactly_as_by_reference_reader() -> None:
    """R1.2, R1.4, R1.11: at the same offset, for the same reason; accepted messages have the same values."""
    outcomes = check_row_changes(80_000)
    assert outcomes.total() == 80_000
    assert set(outcomes) == OUTCOMES


@pytest.mark.slow
def test_ten_million_damaged_row_changes_are_rejected_exactly_as_by_reference_reader() -> None:
    outcomes = check_row_changes(10_000_000, SEED + 1)
    assert outcomes.total() == 10_000_000
    assert set(outcomes) == OUTCOMES


def check_bounds(folder: Path, count: int) -> None:
    """The same with the compiler's bounds checks, each message ending where its array ends."""
    environment = os.environ | {
        "NUMBA_BOUNDSCHECK": "1",
        "NUMBA_CACHE_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-W", "error", "-m", "unit.pgoutput.hostile", str(count)]
    subprocess.run(command, env=environment, check=True)


def test_damaged_row_change_is_never_read_past_its_end(tmp_path: Path) -> None:
    check_bounds(tmp_path, 40_000)


@pytest.mark.slow
def test_two_million_damaged_row_changes_are_never_read_past_their_end(tmp_path: Path) -> None:
    check_bounds(tmp_path, 2_000_000)


def check_messages(count: int, *, in_stream: bool, parallel: bool) -> Counter[str]:
    """Damage `count` messages of all types: each is refused, or is exactly one message.

    Exactly one: written again it gives the same bytes.
    """
    corpus = [
        encode(message, in_stream=in_stream) for message in messages(in_stream=in_stream, parallel=parallel)
    ]
    randomness = np.random.default_rng([SEED, in_stream, parallel])
    outcomes: Counter[str] = Counter()
    for damaged in mutants(corpus, randomness, count):
        message = reference(damaged, in_stream=in_stream, parallel=parallel)
        if isinstance(message, InvalidMessage):
            result = re.fullmatch(r"invalid pgoutput message .*: .* at offset (\d+)", message.message)
            assert result is not None, (damaged.hex(), message)
            assert int(result[1]) <= len(damaged), (damaged.hex(), message)
            outcomes["refused"] += 1
        else:
            assert encode(message, in_stream=in_stream) == damaged, (damaged.hex(), message)
            outcomes[message.type.name] += 1
    return outcomes


@pytest.mark.parametrize(("in_stream", "parallel"), FORMS)
def test_damaged_message_of_any_type_is_rejected_or_is_another_message(
    in_stream: bool, parallel: bool
) -> None:
    """R1.2: whatever is accepted is exactly one message."""
    outcomes = check_messages(10_000, in_stream=in_stream, parallel=parallel)
    assert outcomes["refused"] > 5_000
    assert set(outcomes) == {"refused"} | {
        message.type.name for message in messages(in_stream=in_stream, parallel=parallel)
    }


@pytest.mark.slow
@pytest.mark.parametrize(("in_stream", "parallel"), FORMS)
def test_half_a_million_damaged_messages_of_any_type_are_rejected_or_are_another_message(
    in_stream: bool, parallel: bool
) -> None:
    assert check_messages(500_000, in_stream=in_stream, parallel=parallel).total() == 500_000


@pytest.mark.parametrize(("in_stream", "parallel"), FORMS)
def test_message_with_any_first_byte_is_read_or_rejected(in_stream: bool, parallel: bool) -> None:
    """R1.2: bytes that are no message type are refused as that, all others are read as such."""
    known = {message.type.value.encode()[0] for message in messages(in_stream=in_stream, parallel=parallel)}
    assert len(known) == 19
    for first in range(256):
        unknown = "unknown message type" in refusal(bytes([first, 0]), in_stream, parallel)
        assert unknown == (first not in known), first


def refusal(data: bytes, in_stream: bool, parallel: bool) -> str:
    with pytest.raises(InvalidMessage) as refused:
        decode(data, in_stream=in_stream, streaming_parallel=parallel)
    return refused.value.message
