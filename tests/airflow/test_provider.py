"""The package as a provider of Airflow: connection types with a form and a test, and links."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from embedded.postgres import Cluster
from fixtures.airflow import ROOT, RunInAirflow

ASK = """
import importlib, json, pathlib
import airflow, jsonschema
from airflow.providers_manager import ProvidersManager
from cdc_replay.airflow import PublisherHook, SubscriberHook
from cdc_replay.airflow.provider import get_provider_info

info = get_provider_info()
schema = pathlib.Path(airflow.__file__).parent / "provider_info.schema.json"
jsonschema.validate(info, json.loads(schema.read_text()))
for modules in (*info["operators"], *info["sensors"], *info["triggers"], *info["hooks"]):
    for module in modules["python-modules"]:
        importlib.import_module(module)

manager = ProvidersManager()
manager.initialize_providers_hooks()
answer = {
    "provider": "cdc-replay" in manager.providers,
    "hooks": {
        kind: manager.hooks[kind].hook_name for kind in ("cdc_replay_publisher", "cdc_replay_subscriber")
    },
    "fields": sorted(name for name in manager.connection_form_widgets if "cdc_replay_publisher" in name),
    "links": [link for link in manager.extra_links_class_names if link.startswith("cdc_replay")],
    "tests": [
        PublisherHook("shop_publisher").test_connection(),
        SubscriberHook("dwh").test_connection(),
        SubscriberHook("nowhere").test_connection(),
        PublisherHook("nothing").test_connection(),
    ],
}
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with the metadata of the installed package."""
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "entry-points"
    ]
    metadata = tmp_path / "installed" / "cdc_replay-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: cdc-replay\nVersion: 0\n", encoding="utf-8"
    )
    lines = [
        f"[{group}]\n" + "\n".join(f"{name} = {target}" for name, target in entries.items())
        for group, entries in entry_points.items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    return metadata.parent


def test_airflow_finds_connection_types_and_their_test_asks_the_server(
    run_in_airflow: RunInAirflow, installed: Path, publisher_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(installed)
    dsn = publisher_cluster.dsn()
    answer = run_in_airflow(
        ASK,
        PYTHONPATH=f"{installed}:{':'.join(str(ROOT / name) for name in ('src', 'plugins'))}",
        AIRFLOW_CONN_SHOP_PUBLISHER=dsn.replace("postgresql:", "cdc-replay-publisher:"),
        AIRFLOW_CONN_DWH=dsn.replace("postgresql:", "cdc-replay-subscriber:"),
        AIRFLOW_CONN_NOWHERE="cdc-replay-subscriber://me:s3cret@127.0.0.1:1/x",
    )
    assert answer["provider"]
    assert answer["hooks"] == {
        "cdc_replay_publisher": "CDC replay: publisher",
        "cdc_replay_subscriber": "CDC replay: subscriber",
    }
    assert any("sslmode" in field for field in answer["fields"])
    assert answer["links"] == [
        "cdc_replay.airflow.links.SparkHistoryLink",
        "cdc_replay.airflow.links.StatusPageLink",
        "cdc_replay.airflow.links.ValidationReportLink",
        "cdc_replay.airflow.links.WindowLink",
    ]
    publisher, subscriber, nowhere, unknown = answer["tests"]
    assert publisher[0]
    assert "PostgreSQL" in publisher[1]
    assert subscriber[0]
    assert not nowhere[0]
    assert "s3cret" not in nowhere[1]
    assert unknown[1].startswith('connection "nothing" is not known')


def test_spark_history_is_linked_where_the_connection_has_its_address(run_in_airflow: RunInAirflow) -> None:
    """An address with an account, or one that is no web page, gets no link."""
    addresses = {
        "plain": "https://history.example:18080/spark/",
        "secret": "https://me:s3cret@history.example",
        "script": "javascript:alert(1)",
        "none": None,
    }
    connections = {
        f"AIRFLOW_CONN_{name.upper()}": json.dumps(
            {"conn_type": "spark", "extra": {"history-server": address}}
        )
        for name, address in addresses.items()
    }
    answer = run_in_airflow(
        """
        from cdc_replay.airflow.links import history_server
        answer = {name: history_server(name) for name in ("plain", "secret", "script", "none", "unknown")}
        """,
        AIRFLOW__DATABASE__SQL_ALCHEMY_CONN="sqlite://",
        **connections,
    )
    assert answer == dict.fromkeys(("secret", "script", "none", "unknown")) | {
        "plain": "https://history.example:18080/spark"
    }
