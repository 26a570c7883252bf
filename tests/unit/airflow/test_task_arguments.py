"""What tasks have in common."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from cdc_replay.airflow.task_arguments import FOLLOWING_ARGS, check_one_publisher, with_timeout
from cdc_replay.config import load_config
from cdc_replay.errors import InvalidConfiguration

CONFIG = """
publishers:
  shop: {conn_id: shop, change_log: ./shop}
  depot: {conn_id: depot, change_log: ./depot}
subscriptions:
  nsw: {publisher: shop, publications: [p1], conn_id: dwh}
  stock: {publisher: depot, publications: [p1], conn_id: dwh}
"""


def test_one_application_replays_one_publisher(tmp_path: Path) -> None:
    file = tmp_path / "cdc_replay.yaml"
    file.write_text(CONFIG, encoding="utf-8")
    config = load_config(file)
    assert check_one_publisher(config, ["nsw"]) == "shop"
    for names in ([], ["nsw", "stock"]):
        with pytest.raises(InvalidConfiguration, match="one publisher"):
            check_one_publisher(config, names)


def test_a_task_overrides_the_timeout(tmp_path: Path) -> None:
    file = tmp_path / "cdc_replay.yaml"
    file.write_text(f"{CONFIG}timeouts: {{task: 2h}}", encoding="utf-8")
    config = load_config(file)
    assert with_timeout(config, FOLLOWING_ARGS)["execution_timeout"] == timedelta(hours=2)
    own = {"execution_timeout": timedelta(minutes=1)}
    assert with_timeout(config, own) == own
