"""What DAGs say of themselves, which Airflow compares to find a new version."""

from __future__ import annotations

from pathlib import Path

from cdc_replay.airflow.dag_docs import publisher_doc, replay_doc, subscription_doc
from cdc_replay.config import Config, load_config

CONFIG = """
publishers:
  shop: {dsn: "postgresql://me:s3cret@shop/db", change_log: /var/log/shop}
subscriptions:
  nsw: {publisher: shop, publications: [p1, "a|b`c"], dsn: "postgresql://me:s3cret@dwh/db"}
  act: {publisher: shop, publications: [p1], conn_id: dwh}
"""


def load(tmp_path: Path, text: str) -> Config:
    file = tmp_path / "cdc_replay.yaml"
    file.write_text(text, encoding="utf-8")
    return load_config(file)


def docs(config: Config) -> dict[str, str]:
    return {
        "shop": publisher_doc("text", config.publisher("shop")),
        "group": replay_doc("text", config, ["nsw", "act"]),
        **{
            name: subscription_doc("text", config, configured)
            for name, configured in config.subscriptions.items()
        },
    }


def test_a_changed_configuration_changes_the_dags_of_its_object_only(tmp_path: Path) -> None:
    before = docs(load(tmp_path, CONFIG))
    changed = docs(load(tmp_path, CONFIG.replace("conn_id: dwh", "conn_id: dwh, lock_timeout: 3")))
    assert {name for name in before if before[name] != changed[name]} == {"act", "group"}
    assert docs(load(tmp_path, CONFIG)) == before


def test_secrets_are_neither_shown_nor_part_of_the_digest(tmp_path: Path) -> None:
    before = docs(load(tmp_path, CONFIG))
    assert "s3cret" not in "".join(before.values())
    assert docs(load(tmp_path, CONFIG.replace("s3cret", "other"))) == before


def test_a_name_does_not_end_its_cell(tmp_path: Path) -> None:
    doc = docs(load(tmp_path, CONFIG))["nsw"]
    assert "| publications | `p1, a\\|b'c` |" in doc
    assert "`cdc-replay explain nsw`" in doc
