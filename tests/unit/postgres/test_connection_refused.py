"""A server that is down: libpq's text is told without its question, which the hint answers."""

from __future__ import annotations

import pytest

from cdc_replay.errors import ServerUnavailable
from cdc_replay.postgres.connection import connect


def test_the_error_is_one_sentence_and_a_hint() -> None:
    with pytest.raises(ServerUnavailable) as raised, connect("postgresql://127.0.0.1:1/shop", purpose="test"):
        pass
    assert raised.value.message.endswith("port 1 failed: Connection refused")
    assert raised.value.hint is not None
