"""docs/pgoutput.md is accurate, and its examples run."""

from __future__ import annotations

import dataclasses
import doctest
import re
from pathlib import Path
from typing import Final, get_args

from cdc_replay.pgoutput import messages as m

PAGE: Final = Path(__file__).resolve().parents[3] / "docs" / "pgoutput.md"


def test_page_examples_have_the_results_shown() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    test = doctest.DocTestParser().get_doctest("".join(blocks), {}, PAGE.name, str(PAGE), 0)
    assert len(test.examples) > 20
    runner = doctest.DocTestRunner(verbose=False)
    output: list[str] = []
    runner.run(test, out=output.append)
    assert runner.failures == 0, "".join(output)


def test_page_table_lists_every_message_with_byte_and_fields() -> None:
    rows = re.findall(r"^\| (\w) \| `(\w+)` \| (.*?) ?\| ", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    documented = {(byte, name, tuple(re.findall(r"`(\w+)`", fields))) for byte, name, fields in rows}
    messages: tuple[type[m.Message], ...] = get_args(m.Message)
    assert documented == {
        (message.type.value, message.__name__, tuple(field.name for field in dataclasses.fields(message)))
        for message in messages
    }
