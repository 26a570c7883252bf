"""The text of a first configuration is one, whatever names and DSNs it is made of."""

from __future__ import annotations

from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from cdc_replay.config import load_config
from cdc_replay.config_draft import ConfigDraft, Endpoint, check_name
from cdc_replay.errors import InvalidConfiguration
from cdc_replay.model.relation import QualifiedName

HOSTILE = 'a"b\n# c: d\u2028\U0001f600\x7f\x85'


def test_draft_is_a_valid_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dsn = "postgresql://me:secret@db1:5433/shop?sslmode=require"
    draft = ConfigDraft(
        Endpoint.with_password("on", dsn, has_password=True),
        Endpoint("2.nsw", "host=db2 dbname='d w h'"),
        ("p", HOSTILE),
        {QualifiedName("public", "t"): True, QualifiedName("public", HOSTILE): False},
    )
    text = draft.to_yaml()
    assert "secret" not in text
    assert text.isascii()
    file = tmp_path / "cdc_replay.yaml"
    file.write_text(text, encoding="utf-8")
    monkeypatch.setenv("ON_PASSWORD", r"it\'s")
    config = load_config(file)
    publisher, subscription = config.publisher("on"), config.subscription("2.nsw")
    parts = conninfo_to_dict(config.dsn_of(publisher))
    assert (parts["host"], parts["port"], parts["dbname"]) == ("db1", "5433", "shop")
    assert (parts["user"], parts["password"], parts["sslmode"]) == ("me", "it's", "require")
    assert conninfo_to_dict(config.dsn_of(subscription))["dbname"] == "d w h"
    assert subscription.subscription.publications == ("p", HOSTILE)
    assert draft.missing_tables == (f"public.{HOSTILE}",)
    assert draft.next_commands[:3] == ("export ON_PASSWORD=…", "cdc-replay doctor", "cdc-replay setup on")


@pytest.mark.parametrize("name", ["", ".", "a b", "a\n", "x" * 61, "ä"])
def test_name_that_the_configuration_refuses_is_refused(name: str) -> None:
    with pytest.raises(InvalidConfiguration, match="is not a name"):
        check_name(name)
