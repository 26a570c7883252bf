"""The configuration file: what is accepted, and the one error that names file, line and key."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from cdc_replay.config import Timeouts, load_config
from cdc_replay.errors import InvalidConfiguration
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.subscription import ConflictPolicy, FailurePolicy, OriginPolicy, UnchangedToast
from cdc_replay.model.validation_scope import TablePlan, ValidationPlan
from cdc_replay.opening import setup_request
from cdc_replay.postgres.environment_connection import connection_from_environment

MINIMAL = """\
publishers:
  shop:
    dsn: postgresql://shop
    change_log: ./log
subscriptions:
  nsw:
    publisher: shop
    publications: [p1, p2]
    dsn: postgresql://dwh
"""
LAUGHS = "\n".join(["l0: &l0 [x]", *(f"l{n}: &l{n} [{f'*l{n - 1},' * 20}]" for n in range(1, 30))])
"""Twenty times as many values in each line: more than anybody can count."""


def write(folder: Path, text: str) -> Path:
    file = folder / "cdc_replay.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_omitted_keys_have_their_documented_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL))

    publisher = config.publisher("shop")
    assert publisher.slot == "cdc_replay_shop"
    assert publisher.change_log == str(tmp_path / "log")
    assert not publisher.streaming
    assert not publisher.two_phase
    assert publisher.max_changes_per_pull == 2_000_000
    assert publisher.max_retained_wal is None
    assert publisher.event_trigger
    subscription = config.subscription("nsw").subscription
    assert subscription.publications == ("p1", "p2")
    assert subscription.copy_data
    assert subscription.origin is OriginPolicy.ANY
    assert subscription.on_conflict is ConflictPolicy.ERROR
    assert subscription.on_failure is FailurePolicy.SUBSCRIPTION
    assert subscription.unchanged_toast is UnchangedToast.EXACT
    assert subscription.lock_timeout == 10
    (group,) = config.groups.values()
    assert (group.name, group.subscriptions, group.schedule) == ("shop", ("nsw",), None)
    assert group.spark_conn_id == "spark_default"


def test_subscription_sets_failure_policy_and_lock_timeout(tmp_path: Path) -> None:
    given = MINIMAL + "    on_failure: table\n    lock_timeout: 0.5\n    unchanged_toast: native\n"
    subscription = load_config(write(tmp_path, given)).subscription("nsw").subscription
    assert subscription.unchanged_toast is UnchangedToast.NATIVE
    assert (subscription.on_failure, subscription.lock_timeout) == (FailurePolicy.TABLE, 0.5)


def test_a_publisher_can_do_without_event_triggers(tmp_path: Path) -> None:
    """`setup` is given that."""
    config = load_config(write(tmp_path, MINIMAL.replace("./log", "./log\n    event_trigger: false")))

    assert not config.publisher("shop").event_trigger
    assert not setup_request(config, "shop").event_trigger


def test_the_example_file_is_valid() -> None:
    example = Path(__file__).resolve().parents[2] / "cdc_replay.example.yaml"

    config = load_config(example)

    assert config.groups["shop"].spark_conf == {"spark.driver.memory": "2g"}


def test_a_variable_is_taken_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_HOST", "db.example")
    file = write(tmp_path, MINIMAL.replace("postgresql://shop", "postgresql://${SHOP_HOST}/shop"))

    config = load_config(file)

    assert config.dsn_of(config.publisher("shop")) == "postgresql://db.example/shop"


def test_timeouts_have_defaults_that_a_dsn_need_not_repeat(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL))
    assert config.timeouts == Timeouts()
    assert config.dsn_of(config.publisher("shop")) == "postgresql://shop"


def test_timeouts_go_into_every_dsn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_DWH", "postgres://app:word@dwh/db?sslmode=require")
    text = MINIMAL.replace("dsn: postgresql://dwh", "conn_id: dwh")
    config = load_config(
        write(tmp_path, f"{text}timeouts: {{connect: 5s, tcp_user: 1min, lock: 30s, page: 2s}}\n")
    )
    assert config.timeouts == Timeouts(
        connect=dt.timedelta(seconds=5),
        tcp_user=dt.timedelta(minutes=1),
        lock=dt.timedelta(seconds=30),
        page=dt.timedelta(seconds=2),
    )
    ours = {"connect_timeout": "5", "tcp_user_timeout": "60000", "options": "-c lock_timeout=30000"}
    assert conninfo_to_dict(config.dsn_of(config.publisher("shop"))) == {"host": "shop", **ours}
    for dsn in (config.dsn_of(config.subscription("nsw")), config.dsn_of_connection("dwh")):
        assert conninfo_to_dict(dsn) == {
            "user": "app",
            "password": "word",
            "host": "dwh",
            "dbname": "db",
            "sslmode": "require",
            **ours,
        }


def test_a_table_without_a_plan_of_its_own_has_that_of_the_subscription(tmp_path: Path) -> None:
    validation = """\
    validation:
      every: 1d
      max_proof_age: 9d
      max_seconds: 90
      max_bytes: 1GB
      tables:
        public.big: {every: 7d, sample: 50%, max_proof_age: 30d}
        public.other: {sample: 20%}
"""
    plan = load_config(write(tmp_path, MINIMAL + validation)).subscription("nsw").validation
    day = dt.timedelta(days=1)
    assert (plan.max_seconds, plan.max_bytes) == (90, 1 << 30)
    assert plan.of_table(QualifiedName("public", "big")) == TablePlan(7 * day, 0.5, 30 * day)
    assert plan.of_table(QualifiedName("public", "other")) == TablePlan(day, 0.2, 9 * day)
    assert plan.of_table(QualifiedName("public", "rest")) == TablePlan(day, 1.0, 9 * day)
    assert load_config(write(tmp_path, MINIMAL)).subscription("nsw").validation == ValidationPlan()


def test_an_object_store_is_left_as_it_is(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL.replace("./log", "s3://bucket/log")))

    assert config.publisher("shop").change_log == "s3://bucket/log"


@pytest.mark.parametrize(
    ("change", "line", "words"),
    [
        (
            ("    dsn: postgresql://shop\n", "    dns: postgresql://shop\n"),
            3,
            "publishers.shop.dns: unknown key",
        ),
        (("postgresql://shop", "postgresql://${NOT_SET}"), 3, 'variable "NOT_SET" is not set'),
        (("    change_log: ./log\n", ""), 2, "publishers.shop.change_log: the key is missing"),
        (("  shop:\n", f"  {'s' * 60}:\n"), 2, "too long for that of its slot: give `slot`"),
        (("publisher: shop", "publisher: shoe"), 7, 'publisher "shoe" is not configured'),
        (("[p1, p2]", "[p1, p1]"), 8, "a publication is named twice"),
        (("[p1, p2]", "[]"), 8, "subscriptions.nsw.publications"),
        (("[p1, p2]", "[p1, '']"), 8, "subscriptions.nsw.publications.1"),
        (("  nsw:\n", "  ..:\n"), 6, '".." is not a name'),
        (("  shop:\n", "  .:\n"), 2, '"." is not a name'),
        (("postgresql://dwh", "postgresql://dwh\n    group: .."), 10, '".." is not a name'),
        (("    dsn: postgresql://dwh\n", ""), 6, "exactly one of conn_id and dsn must be given"),
        (("publications: [p1, p2]", "publications: [p1"), 9, "not valid YAML"),
        (("  shop:\n", "  shop: {}\n  shop:\n"), 3, 'key "shop" is given twice'),
        (("    change_log", "    streaming: maybe\n    change_log"), 4, "publishers.shop.streaming"),
        (("publications: [p1, p2]", "publications:"), 8, "subscriptions.nsw.publications"),
        (("    change_log", "    streaming: !!bool x\n    change_log"), 4, "is not of the type bool"),
        (("./log", "./l\0g"), 4, "character U+0000 is not allowed"),
        (("./log", r'"./l\0g"'), 4, "character U+0000 is not allowed"),
        (("[p1, p2]", r'["p\0"]'), 8, "character U+0000 is not allowed"),
        (("postgresql://shop", r'"postgresql://shop\0?sslmode=require"'), 3, "character U+0000 is not"),
        (("./log", "file:///l%00g"), 4, "change_log: not the name of a folder"),
        (("./log", "./l\x1bg"), 4, "character U+001B is not allowed"),
        (("./log", "./l" + "é" * 999 + "\x1bg"), 4, "character U+001B is not allowed"),
        (("  shop:\n", "  shop: &a\n    slot: *a\n"), 3, "contains itself by an alias"),
        (("[p1, p2]", "&a [p1, [*a]]"), 8, "contains itself by an alias"),
        (("publishers:\n", f"{LAUGHS}\npublishers:\n"), 4, "more than 100000 values"),
        (("publishers:\n", "timeouts: {page: 0}\npublishers:\n"), 1, "timeouts.page"),
        (("publishers:\n", "timeouts: {lock: 5}\npublishers:\n"), 1, "not a duration"),
        (("publishers:\n", "timeouts: {statement: 30d}\npublishers:\n"), 1, "timeouts.statement"),
        (("[p1, p2]", "[p1]\n    validation: {sample: 0%}"), 9, "validation.sample: not a share"),
        (("[p1, p2]", "[p1]\n    validation:\n      every: 1w"), 10, "validation.every: not a duration"),
        (("[p1, p2]", "[p1]\n    validation: {max_seconds: 0}"), 9, "validation.max_seconds"),
        (("[p1, p2]", "[p1]\n    validation: {max_bytes: much}"), 9, "validation.max_bytes: not a size"),
        (("[p1, p2]", "[p1]\n    validation: {tables: {big: {}}}"), 9, "give it as SCHEMA.TABLE"),
        (
            ("[p1, p2]", "[p1]\n    validation:\n      tables:\n        public.big: {evry: 1d}"),
            11,
            "validation.tables.public.big.evry: unknown key",
        ),
        (
            (
                "[p1, p2]",
                "[p]\n    validation: {tables: {p.t: {every: 1d, sample: 5%, max_proof_age: 9d}}}",
            ),
            9,
            "`max_proof_age` is too short: with `every` and `sample`, a proof becomes 20 d old",
        ),
        (("[p1, p2]", "[" * 3000 + "]" * 3000), 1, "nested too deeply"),
        (("[p1, p2]", "[" * 18 + "]" * 18), 8, "nested too deeply"),
        (("[p1, p2]", "{? &a [x, y] : 1, ? [*a, *a] : 2}"), 8, "a key must be a text"),
        (("[p1, p2]", "[&a [[[[[[[[[1]]]]]]]]], [[[[[[[[[*a]]]]]]]]]]"), 8, "nested too deeply"),
    ],
)
def test_an_error_names_file_line_and_key(
    tmp_path: Path, change: tuple[str, str], line: int, words: str
) -> None:
    file = write(tmp_path, MINIMAL.replace(*change))

    with pytest.raises(InvalidConfiguration) as caught:
        load_config(file)

    assert f"{file}, line {line}: " in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("first", "other"), [("./log", "log/../log/"), ("./log", "{folder}/log"), ("s3://b/log", "s3://b/log/")]
)
def test_publishers_that_share_a_change_log_are_refused(tmp_path: Path, first: str, other: str) -> None:
    second = f"  mall:\n    dsn: postgresql://mall\n    change_log: {other.format(folder=tmp_path)}\n"
    given = MINIMAL.replace("./log\n", f"{first}\n{second}")
    with pytest.raises(
        InvalidConfiguration, match=r'line 7: publishers\.mall\.change_log: publisher "shop" has the same'
    ):
        load_config(write(tmp_path, given))


@pytest.mark.parametrize("nothing", ["", "null", "~", "# to be done"])
def test_a_value_that_is_empty_is_null(tmp_path: Path, nothing: str) -> None:
    """What null means depends on the key: the default, or nothing that can be used."""
    given = MINIMAL.replace("./log", f"./log\n    slot: {nothing}\n    max_retained_wal: {nothing}")
    publisher = load_config(write(tmp_path, given)).publisher("shop")
    assert (publisher.slot, publisher.max_retained_wal) == ("cdc_replay_shop", None)

    for key in ("snapshot_chunk", "on_failure", "unchanged_toast"):
        with pytest.raises(InvalidConfiguration, match=rf"line 10: subscriptions\.nsw\.{key}: "):
            load_config(write(tmp_path, f"{MINIMAL}    {key}: {nothing}\n"))
    with pytest.raises(InvalidConfiguration, match="line 10: groups: "):
        load_config(write(tmp_path, f"{MINIMAL}groups: {nothing}\n"))


def test_a_group_without_subscriptions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidConfiguration, match=r"line 11: groups.other: no subscription is in this group"
    ):
        load_config(write(tmp_path, MINIMAL + "groups:\n  other: {}\n"))


def test_missing_file_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match="does not exist") as caught:
        load_config(tmp_path / "nothing.yaml")

    assert "--config" in str(caught.value)
    assert "`cdc-replay init`" in str(caught.value)


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL))

    with pytest.raises(InvalidConfiguration, match=r'subscription "vic" is not configured') as caught:
        config.subscription("vic")

    assert "nsw" in str(caught.value)


def test_a_dsn_is_not_in_the_repr(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path, MINIMAL.replace("postgresql://shop", "postgresql://u:secret@h/shop"))
    )

    assert "secret" not in repr(config)


@pytest.mark.parametrize("typo", ["dsn:", "dsn ", ""])
def test_a_dsn_that_became_a_key_is_not_repeated(tmp_path: Path, typo: str) -> None:
    """Such errors are on the page of Airflow's import errors, too."""
    file = write(tmp_path, f"publishers: {{shop: {{{typo}postgresql://u:secret@h/shop, change_log: x}}}}")

    with pytest.raises(InvalidConfiguration, match=r"line 1: publishers\.shop\.…: unknown key") as raised:
        load_config(file)

    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        '{"password": "secret", "extra": [1]}',
        '{"password": "secret", "extra": "[1]"}',
        '{"password": "secret", "extra": 5}',
        '{"password": "secret", "extra": {"a": ' + "[" * 100_000,
        '{"password": "secret", "port": ' + "5" * 5000 + "}",
        '{"password": "secret", "conn_type": []}',
        '{"password": "secret\\ud800"}',
        "postgresql://u:secret@h/db?__extra__=5",
        "postgresql://u:secret@h/db?__extra__=null",
    ],
)
def test_a_connection_that_is_not_one_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_A", text)
    with pytest.raises(InvalidConfiguration, match='connection "a" is') as raised:
        connection_from_environment("a")
    assert "secret" not in str(raised.value)


def test_a_connection_may_be_a_uri_or_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_A", "postgres://u:p%40ss@h:5433/db?sslmode=require")
    monkeypatch.setenv(
        "AIRFLOW_CONN_B",
        '{"conn_type": "postgres", "login": "u", "password": "p@ss", "host": "h", "port": 5433,'
        ' "schema": "db", "extra": {"sslmode": "require"}}',
    )

    expected = "postgresql://u:p%40ss@h:5433/db?sslmode=require"
    assert connection_from_environment("a") == expected
    assert connection_from_environment("b") == expected


EXTRA = json.dumps({"cursor": "dictcursor", "options": "-c x=1"})


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"conn_type": "postgres", "host": "/run/pg", "schema": "ware house", "extra": EXTRA}),
        "postgres://%2Frun%2Fpg/ware%20house?cursor=dictcursor&options=-c+x%3D1",
        "postgres://%2Frun%2Fpg/ware%20house?__extra__=%7B%22cursor%22%3A+1%2C+%22options%22%3A+%22-c+x%3D1%22%7D",
        "postgresql:///ware%20house?host=/run/pg&options=-c%20x=1",
    ],
)
def test_connection_reaches_libpq_with_the_options_of_libpq(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_A", text)

    assert conninfo_to_dict(connection_from_environment("a")) == {
        "host": "/run/pg", "dbname": "ware house", "options": "-c x=1",
    }  # fmt: skip


def test_a_connection_of_another_type_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_A", '{"conn_type": "mysql", "host": "h"}')
    with pytest.raises(InvalidConfiguration, match='connection "a" is of type "mysql"'):
        connection_from_environment("a")


def test_an_unknown_connection_names_its_variable() -> None:
    with pytest.raises(InvalidConfiguration, match="AIRFLOW_CONN_NOWHERE"):
        connection_from_environment("nowhere")


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("4096", 4096), ("16kB", 16 << 10), ("'512 MB'", 512 << 20), ("50GB", 50 << 30), ("1TB", 1 << 40)],
)
def test_a_size_is_read_as_postgresql_writes_it(text: str, size_bytes: int, tmp_path: Path) -> None:
    given = MINIMAL.replace("./log", f"./log\n    max_retained_wal: {text}")
    assert load_config(write(tmp_path, given)).publisher("shop").max_retained_wal == size_bytes


@pytest.mark.parametrize("text", ["0", "-1", "50gb", "1.5GB", "much", "GB"])
def test_invalid_size_is_refused_with_its_line(text: str, tmp_path: Path) -> None:
    given = MINIMAL.replace("./log", f"./log\n    max_retained_wal: {text}")
    with pytest.raises(InvalidConfiguration, match=r"line 5: publishers\.shop\.max_retained_wal: "):
        load_config(write(tmp_path, given))


@pytest.mark.parametrize(
    ("text", "hours"),
    [("7d", 168), ("36h", 36), ("90min", 1.5), ('"2 d"', 48), ("0", 0), ("0h", 0)],
)
def test_keep_is_a_duration(tmp_path: Path, text: str, hours: float) -> None:
    given = MINIMAL.replace("./log", f"./log\n    keep: {text}")
    assert load_config(write(tmp_path, given)).publisher("shop").keep == dt.timedelta(hours=hours)


@pytest.mark.parametrize("text", ["7", "-1d", "1.5d", "7 days", "1w", "true", "[7d]", "'7d 3h'", "9999999d"])
def test_invalid_duration_is_refused(tmp_path: Path, text: str) -> None:
    given = MINIMAL.replace("./log", f"./log\n    keep: {text}")
    with pytest.raises(InvalidConfiguration, match=r"line 5: publishers\.shop\.keep: not a duration"):
        load_config(write(tmp_path, given))
