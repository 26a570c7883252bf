"""The configuration: a YAML file → frozen values, or one error that names file, line and key.

Relative paths are relative to the file's folder, so that a command does not depend on the current folder. A
`conn_id` is resolved when a connection is opened, not when the file is read: secrets stay where they are.
"""

from __future__ import annotations

import datetime as dt
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeVar

from pydantic import ValidationError

from cdc_replay.config_file import ConfigFile, read_config_file
from cdc_replay.config_schema import (
    LONGEST_SLOT_NAME,
    Alarms,
    Channel,
    File,
    Group,
    Publisher,
    TableValidation,
    Validation,
)
from cdc_replay.config_schema import Subscription as GivenSubscription
from cdc_replay.errors import InvalidConfiguration
from cdc_replay.model.problems import Bounds
from cdc_replay.model.proof import runs_for_all
from cdc_replay.model.subscription import (
    ConflictPolicy,
    FailurePolicy,
    OriginPolicy,
    Subscription,
    UnchangedToast,
)
from cdc_replay.model.suggestion import did_you_mean
from cdc_replay.model.validation_scope import TablePlan, ValidationPlan
from cdc_replay.postgres.environment_connection import connection_from_environment
from cdc_replay.postgres.timeouts import SessionTimeouts

_OBJECT_STORE: Final = re.compile(r"[a-z0-9]+://")
_PLAIN_KEY: Final = re.compile(r"[^@:=\[({]*")
_T = TypeVar("_T")
Resolver = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class PublisherConfig:
    """A publisher, its slot and its change log."""

    name: str
    conn_id: str | None
    dsn_text: str | None = field(repr=False)
    slot: str
    change_log: str
    streaming: bool
    two_phase: bool
    max_changes_per_pull: int
    max_retained_wal: int | None
    """In bytes; None: limited by the server's settings only."""
    event_trigger: bool
    """Whether `setup` installs event triggers on the publisher, if its role may."""
    keep: dt.timedelta
    """`prune` keeps transactions that committed within this time, also if no subscription needs them."""
    pool: str | None
    """Airflow's, of tasks that read the slot; None: the default pool."""
    alarm_retained_wal: int | None
    """In bytes; more is an alarm."""


@dataclass(frozen=True, slots=True)
class SubscriptionConfig:
    """A subscription, its target and its group."""

    subscription: Subscription
    conn_id: str | None
    dsn_text: str | None = field(repr=False)
    group: str
    snapshot_chunk: int
    """Bytes of a table that a snapshot reads at once: what a kill can lose, per reader."""
    snapshot_readers: int | None
    """Maximum of concurrent snapshot tasks, each with one connection to both sides; None: Spark's cores."""
    snapshot_rate: int | None
    """Bytes per second that all readers of a snapshot together may copy; None: no limit."""
    reports_values: bool
    """Whether reports show values of differing rows, not only their keys."""
    alarm_bounds: Bounds
    """What is beyond them is an alarm."""
    validation: ValidationPlan
    """How its tables are validated when that is scheduled."""

    @property
    def name(self) -> str:
        """The subscription's name."""
        return self.subscription.name


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """The subscriptions of one publisher that one Spark application replays together."""

    name: str
    publisher: str
    subscriptions: tuple[str, ...]
    schedule: str | None
    spark_conn_id: str
    spark_conf: Mapping[str, str]
    pool: str | None
    """Airflow's, of tasks that work on the subscribers; None: the default pool."""
    follow: dt.timedelta
    """How long a replay task goes on with what is committed meanwhile; 0: not at all."""


@dataclass(frozen=True, slots=True)
class Timeouts(SessionTimeouts):
    """Timeouts of sessions, requests, tasks and runs; 0 is no limit for a task and a run."""

    answer: dt.timedelta = dt.timedelta(seconds=10)
    """How long `status` and the watch wait for the servers."""
    page: dt.timedelta = dt.timedelta(seconds=3)
    """How long the page in Airflow waits for them, before it shows their last answers."""
    task: dt.timedelta = dt.timedelta(days=1)
    """How long one try of a task may take."""
    run: dt.timedelta = dt.timedelta(days=4)
    """How long a run of a DAG may take: every try of its tasks."""


@dataclass(frozen=True, slots=True)
class AlarmChannel:
    """A mail channel if `to` has addresses, else a webhook; `is_chat`: in the form that Slack takes."""

    conn_id: str
    to: tuple[str, ...] = ()
    sender: str | None = None
    is_chat: bool = False


@dataclass(frozen=True, slots=True)
class AlarmSettings:
    """Who is told of alarms, and what may pass without a word."""

    notify: tuple[AlarmChannel, ...]
    patience: dt.timedelta
    link: str | None


@dataclass(frozen=True, slots=True)
class Config:
    """The whole file, checked; connections are resolved by `dsn_of`."""

    path: Path
    publishers: Mapping[str, PublisherConfig]
    subscriptions: Mapping[str, SubscriptionConfig]
    groups: Mapping[str, GroupConfig]
    connections: Resolver
    timeouts: Timeouts
    alarms: AlarmSettings

    def publisher(self, name: str) -> PublisherConfig:
        """The publisher of that name.

        Raises:
            InvalidConfiguration: if the file has none.
        """
        return self._named(self.publishers, name, "publisher")

    def subscription(self, name: str) -> SubscriptionConfig:
        """The subscription of that name.

        Raises:
            InvalidConfiguration: if the file has none.
        """
        return self._named(self.subscriptions, name, "subscription")

    def subscriptions_of(self, publisher: str) -> tuple[SubscriptionConfig, ...]:
        """All subscriptions of a publisher, in the file's order."""
        return tuple(
            configured
            for configured in self.subscriptions.values()
            if configured.subscription.publisher == publisher
        )

    def wants_origin_none(self, publisher: str) -> bool:
        """Whether a subscription of the publisher must not see changes with an origin (R8.19)."""
        return any(
            configured.subscription.origin is OriginPolicy.NONE
            for configured in self.subscriptions_of(publisher)
        )

    def dsn_of(self, endpoint: PublisherConfig | SubscriptionConfig) -> str:
        """The libpq DSN of an endpoint, with the timeouts. A secret: never log it.

        Raises:
            InvalidConfiguration: if its connection is not known.
        """
        if endpoint.dsn_text is not None:
            return self.timeouts.add_to(endpoint.dsn_text)
        return self.dsn_of_connection(endpoint.conn_id or "")

    def dsn_of_connection(self, conn_id: str) -> str:
        """The libpq DSN of a connection, with the timeouts. A secret: never log it.

        Raises:
            InvalidConfiguration: if it is not known.
        """
        return self.timeouts.add_to(self.connections(conn_id))

    @property
    def expectations(self) -> Path:
        """The folder of the Great Expectations project: `CDC_REPLAY_EXPECTATIONS`, or beside the file."""
        return Path(os.environ.get("CDC_REPLAY_EXPECTATIONS") or self.path.parent / "expectations")

    def _named(self, values: Mapping[str, _T], name: str, kind: str) -> _T:
        try:
            return values[name]
        except KeyError:
            known = ", ".join(sorted(values)) or "none"
            raise InvalidConfiguration(
                f'{kind} "{name}" is not configured',
                detail=f"{self.path} has: {known}.",
                hint=did_you_mean(name, values),
            ) from None


def load_config(
    path: str | Path | None = None, *, connections: Resolver = connection_from_environment
) -> Config:
    """Read and check a configuration file: `path`, else `CDC_REPLAY_CONFIG`, else `cdc_replay.yaml`.

    Raises:
        InvalidConfiguration: naming file, line and key of what is wrong.
    """
    file = read_config_file(path)
    try:
        parsed = File.model_validate(file.content)
    except ValidationError as error:
        raise _to_configuration_error(file, error) from None
    for keys, message in _contradictions(file.path, parsed):
        line = file.lines.get(keys, 1)
        raise InvalidConfiguration(f"{file.path}, line {line}: {'.'.join(keys)}: {message}")
    return _to_config(file.path, parsed, connections)


def _to_configuration_error(file: ConfigFile, error: ValidationError) -> InvalidConfiguration:
    """One message with every problem; values are not repeated, a DSN could be among them, also as a key."""
    problems = []
    for problem in error.errors(include_url=False, include_input=False):
        keys = tuple(str(key) for key in problem["loc"] if key != "[key]")
        message = {
            "extra_forbidden": "unknown key",
            "missing": "the key is missing",
        }.get(problem["type"], problem["msg"].removeprefix("Value error, "))
        shown = [key if _PLAIN_KEY.fullmatch(key) else "…" for key in keys]
        problems.append(f"line {file.line_of(keys)}: {'.'.join(shown) or 'file'}: {message}")
    return InvalidConfiguration(f"{file.path}, {problems[0]}", detail="; ".join(problems[1:]) or None)


def _to_config(file: Path, parsed: File, connections: Resolver) -> Config:
    alarms = parsed.alarms
    publishers = {name: _publisher(name, given, file, alarms) for name, given in parsed.publishers.items()}
    subscriptions = {name: _subscription(name, given, alarms) for name, given in parsed.subscriptions.items()}
    groups = {
        name: _group(name, parsed.groups.get(name, Group()), subscriptions)
        for name in dict.fromkeys(subscription.group for subscription in subscriptions.values())
    }
    timeouts = Timeouts(**parsed.timeouts.model_dump(exclude_none=True))
    settings = AlarmSettings(
        tuple(_channel(channel) for channel in alarms.notify), alarms.patience, alarms.link
    )
    return Config(file, publishers, subscriptions, groups, connections, timeouts, settings)


def _contradictions(file: Path, parsed: File) -> Iterator[tuple[tuple[str, ...], str]]:
    """Problems that no single key shows: key path and message."""
    yield from _slots_without_name(parsed)
    yield from _shared_change_logs(file, parsed)
    yield from _shared_slots(parsed)
    publisher_of_group: dict[str, str] = {}
    for name, given in parsed.subscriptions.items():
        if given.publisher not in parsed.publishers:
            yield ("subscriptions", name, "publisher"), f'publisher "{given.publisher}" is not configured'
        if len(set(given.publications)) < len(given.publications):
            yield ("subscriptions", name, "publications"), "a publication is named twice"
        group = given.group or given.publisher
        if publisher_of_group.setdefault(group, given.publisher) != given.publisher:
            yield ("subscriptions", name, "group"), f'group "{group}" has another publisher'
        yield from _unreachable_proofs(name, given.validation)
    for name in parsed.groups:
        if name not in publisher_of_group:
            yield ("groups", name), "no subscription is in this group"


def _unreachable_proofs(name: str, given: Validation) -> Iterator[tuple[tuple[str, ...], str]]:
    keys = ("subscriptions", name, "validation")
    plan = _validation_plan(given)
    plans = {keys: plan.default} | {(*keys, "tables", table): own for table, own in plan.tables.items()}
    for path, table in plans.items():
        if table.every is None or table.max_proof_age is None:
            continue
        # The oldest part of the proof is that old when its turn comes again.
        age = table.every * runs_for_all(table.sample)
        if age > table.max_proof_age:
            days = f"{age / dt.timedelta(days=1):g}"
            yield (
                path,
                f"`max_proof_age` is too short: with `every` and `sample`, a proof becomes {days} d old",
            )


def _slots_without_name(parsed: File) -> Iterator[tuple[tuple[str, ...], str]]:
    for name, given in parsed.publishers.items():
        if given.slot is None and len(_default_slot(name)) > LONGEST_SLOT_NAME:
            yield ("publishers", name), "the name is too long for that of its slot: give `slot`"


def _shared_change_logs(file: Path, parsed: File) -> Iterator[tuple[tuple[str, ...], str]]:
    owners: dict[str, str] = {}
    for name, given in parsed.publishers.items():
        owner = owners.setdefault(_change_log(given, file).rstrip("/"), name)
        if owner != name:
            message = f'publisher "{owner}" has the same change log: give each its own'
            yield ("publishers", name, "change_log"), message


def _shared_slots(parsed: File) -> Iterator[tuple[tuple[str, ...], str]]:
    # Changes read for one log would be missing in the other. `setup` and `capture` detect more such cases.
    owners: dict[tuple[str | None, str | None, str], str] = {}
    for name, given in parsed.publishers.items():
        owner = owners.setdefault((given.conn_id, given.dsn, given.slot or _default_slot(name)), name)
        if owner != name:
            message = f'publisher "{owner}" reads the same replication slot: give each its own'
            yield ("publishers", name, "slot"), message


def _default_slot(publisher: str) -> str:
    return f"cdc_replay_{re.sub(r'[^a-z0-9_]', '_', publisher.lower())}"


def _change_log(given: Publisher, file: Path) -> str:
    log = given.change_log
    return log if _OBJECT_STORE.match(log) else str((file.parent / log).resolve())


def _channel(given: Channel) -> AlarmChannel:
    if given.email is not None:
        return AlarmChannel(given.email.conn_id, tuple(given.email.to), given.email.sender)
    if given.webhook is not None:
        return AlarmChannel(given.webhook.conn_id, is_chat=given.webhook.format == "slack")
    raise AssertionError(given)  # the schema wants exactly one


def _bounds(given: GivenSubscription, alarms: Alarms) -> Bounds:
    age = given.alarms.max_proof_age or alarms.max_proof_age
    lag = given.alarms.max_lag or alarms.max_lag
    return replace(Bounds.of_lag(lag) if lag else Bounds(), proof_age=age)


def _publisher(name: str, given: Publisher, file: Path, alarms: Alarms) -> PublisherConfig:
    return PublisherConfig(
        name=name,
        conn_id=given.conn_id,
        dsn_text=given.dsn,
        slot=given.slot or _default_slot(name),
        change_log=_change_log(given, file),
        streaming=given.streaming,
        two_phase=given.two_phase,
        max_changes_per_pull=given.max_changes_per_pull,
        max_retained_wal=given.max_retained_wal,
        event_trigger=given.event_trigger,
        keep=given.keep,
        pool=given.pool,
        alarm_retained_wal=given.alarms.max_retained_wal or alarms.max_retained_wal,
    )


def _subscription(name: str, given: GivenSubscription, alarms: Alarms) -> SubscriptionConfig:
    subscription = Subscription(
        name=name,
        publisher=given.publisher,
        publications=tuple(given.publications),
        copy_data=given.copy_data,
        origin=OriginPolicy(given.origin),
        on_conflict=ConflictPolicy(given.on_conflict),
        on_failure=FailurePolicy(given.on_failure),
        unchanged_toast=UnchangedToast(given.unchanged_toast),
        lock_timeout=given.lock_timeout,
        run_as_owner=given.run_as_owner,
    )
    return SubscriptionConfig(
        subscription,
        given.conn_id,
        given.dsn,
        given.group or given.publisher,
        snapshot_chunk=given.snapshot_chunk,
        snapshot_readers=given.snapshot_readers,
        snapshot_rate=given.snapshot_rate,
        reports_values=given.report_values == "all",
        alarm_bounds=_bounds(given, alarms),
        validation=_validation_plan(given.validation),
    )


def _validation_plan(given: Validation) -> ValidationPlan:
    """What a table's own plan leaves out is that of all tables."""
    default = _table_plan(given, TablePlan())
    return ValidationPlan(
        default,
        {name: _table_plan(table, default) for name, table in given.tables.items()},
        given.max_seconds,
        given.max_bytes,
    )


def _table_plan(given: TableValidation, default: TablePlan) -> TablePlan:
    return TablePlan(
        every=default.every if given.every is None else given.every,
        sample=default.sample if given.sample is None else given.sample,
        max_proof_age=default.max_proof_age if given.max_proof_age is None else given.max_proof_age,
    )


def _group(name: str, given: Group, subscriptions: Mapping[str, SubscriptionConfig]) -> GroupConfig:
    members = [member for member in subscriptions.values() if member.group == name]
    return GroupConfig(
        name=name,
        publisher=members[0].subscription.publisher,
        subscriptions=tuple(member.name for member in members),
        schedule=given.schedule,
        spark_conn_id=given.spark_conn_id,
        spark_conf={key: _spark_text(value) for key, value in given.spark_conf.items()},
        pool=given.pool,
        follow=given.follow or dt.timedelta(),
    )


def _spark_text(value: str | float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
