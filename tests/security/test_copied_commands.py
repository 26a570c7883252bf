"""People copy the commands of hints, alarms and reports into a shell; owners of tables choose their names."""

from __future__ import annotations

import html
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cdc_replay.filters.printed import unprintable_filter
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.publication import RowFilter
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.status import TableStatus, TableSync
from cdc_replay.replay.apply.conflicts import ambiguous_key, unknown_value
from unit.model.test_problems import NSW, SHOP, told
from unit.validate.test_html_report import DIFFERING, page

TABLE = QualifiedName("public", "t;touch ran;$(touch ran) 'it''s'")

PARKED = TableStatus("nsw", str(TABLE), "parked: x", sync=TableSync.PARKED, parked_transaction=Lsn(16))
DIFFERENT = TableStatus("nsw", str(TABLE), "replayed", proof="not proven", differing_buckets=2)
UNPROVEN = TableStatus("nsw", str(TABLE), "replayed", max_proof_age_seconds=60.0)

TEXTS: dict[str, Callable[[], str | None]] = {
    "parked": lambda: told(SHOP, NSW, PARKED),
    "different": lambda: told(SHOP, NSW, DIFFERENT),
    "unproven": lambda: told(SHOP, NSW, UNPROVEN),
    "ambiguous": lambda: ambiguous_key(TABLE, 1, ["(id)=(1)"]).hint,
    "unknown": lambda: unknown_value(TABLE, ["a"], "(id)=(1)", 16, 1).hint,
    "filter": lambda: unprintable_filter(TABLE, RowFilter("a", "a"), "x").hint,
    "report": lambda: html.unescape(re.sub("</?code>", "`", page(replace(DIFFERING, name=TABLE)))),
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_copied_command_gets_the_name_as_one_word(text: Callable[[], str | None], tmp_path: Path) -> None:
    program = tmp_path / "cdc-replay"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n', encoding="ascii")
    program.chmod(0o700)
    commands = [found for found in re.findall("`(cdc-replay [^`]*)`", text() or "") if "--table" in found]
    assert commands
    for command in commands:
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=tmp_path,
            env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert str(TABLE) in done.stdout.splitlines(), (command, done.stderr)
    assert not (tmp_path / "ran").exists()
