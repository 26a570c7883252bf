"""Change logs and states that earlier versions wrote are read, replayed and upgraded in place.

`tools/release_fixture.py` wrote the files, one folder for each version. The publisher no longer exists.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
import yaml

import release_fixture
from cdc_replay.commands.replay import replay
from cdc_replay.commands.verify_log import verify_log
from cdc_replay.config import Config, load_config
from fixtures.postgres import Database

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VERSIONS: Final = sorted((Path(__file__).parents[2] / "fixtures").glob("written_by_*"))

OF_THIS_DATABASE: Final = """
update cdc_replay.subscription_table
set relation = to_regclass(format('%I.%I', schema_name, table_name))::oid;
update cdc_replay.brought set relation = to_regclass(format('%I.%I', schema_name, table_name))::oid;
"""
"""A dump gives tables other oids; an upgraded server keeps them."""

NEWER_SETTING: Final = re.compile(r"^SET transaction_timeout .*$", re.MULTILINE)
"""What `pg_dump` writes that servers before 17 refuse."""


@pytest.fixture(params=VERSIONS, ids=lambda folder: str(folder.name))
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    shutil.copytree(request.param, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def config(files: Path, subscriber: Database) -> Config:
    dump = (files / "subscriber.sql").read_text(encoding="utf-8")
    subscriber.run(NEWER_SETTING.sub("", dump))
    subscriber.run(OF_THIS_DATABASE)
    subscription = {"publisher": "shop", "publications": ["nsw", "parts"], "dsn": subscriber.dsn}
    content = {
        "publishers": {"shop": {"dsn": "postgresql://nobody@127.0.0.1:1/shop", "change_log": "change_log"}},
        "subscriptions": {"nsw": subscription},
    }
    file = files / "cdc_replay.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return load_config(file)


def test_they_are_read_and_replayed(
    spark: SparkSession, config: Config, files: Path, subscriber: Database
) -> None:
    assert spark.version
    verified = verify_log(config, "shop")
    (result,) = replay(config, ["nsw"])
    assert result.error is None
    assert result.to_lsn == verified.to_lsn
    assert (result.transactions, result.conflicts) == (len(release_fixture.NOT_REPLAYED), {})
    expected = json.loads((files / "rows.json").read_text(encoding="utf-8"))
    for table, rows in expected.items():
        assert [row for (row,) in subscriber.rows(f"select to_jsonb(t) from {table} t order by id")] == rows
    assert subscriber.rows("select count(*) from cdc_replay.result where command = 'replay'") == [(3,)]
    (again,) = replay(config, ["nsw"])
    assert (again.error, again.transactions) == (None, 0)
