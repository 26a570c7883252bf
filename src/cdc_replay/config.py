"""The configuration file: YAML → frozen values, or one error that names file, line and key.

`${NAME}` in a value is replaced from the environment. Relative paths are relative to the file's folder, so
that a command means the same from everywhere. Secrets are resolved as late as possible: a `conn_id` is looked
up when a connection is opened, never when the file is read.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar
from urllib.parse import parse_qsl

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from cdc_replay.errors import InvalidConfiguration
from cdc_replay.model.duration import parse_duration
from cdc_replay.model.size import parse_size
from cdc_replay.model.subscription import (
    ConflictPolicy,
    FailurePolicy,
    OriginPolicy,
    Subscription,
    UnchangedToast,
)
from cdc_replay.postgres.airflow_connection import (
    ADDRESS_OPTIONS,
    CONNECTION_TYPES,
    LIBPQ_OPTIONS,
    AirflowConnection,
    check_type,
    libpq_query,
)
from cdc_replay.postgres.timeouts import SessionTimeouts

VARIABLE: Final = "CDC_REPLAY_CONFIG"
DEFAULT_FILE: Final = "cdc_replay.yaml"
DEFAULT_KEEP: Final = dt.timedelta(days=7)

_REFERENCE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_OBJECT_STORE: Final = re.compile(r"[a-z0-9]+://")


def _not_relative(name: str) -> str:
    """Reports of a subscription are in a folder of its name."""
    if name in {".", ".."}:
        raise ValueError(f'"{name}" is not a name: it stands for a folder')
    return name


Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,60}$"), AfterValidator(_not_relative)]
LONGEST_SLOT_NAME: Final = 63
SlotName = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9_]+$", min_length=1, max_length=LONGEST_SLOT_NAME)
]
Size = Annotated[int, BeforeValidator(lambda size: parse_size(str(size))), Field(ge=1)]
Duration = Annotated[dt.timedelta, BeforeValidator(lambda duration: parse_duration(str(duration)))]
Limit = Annotated[Duration, Field(le=dt.timedelta(days=20))]
"""The server counts milliseconds in 31 bits."""
Wait = Annotated[Limit, Field(ge=dt.timedelta(seconds=1))]
_T = TypeVar("_T")
Resolver = Callable[[str], str]


def connection_from_environment(conn_id: str) -> str:
    """The DSN of an Airflow connection that is given as `AIRFLOW_CONN_<ID>`, in URI or JSON form.

    Raises:
        InvalidConfiguration: if the variable is not set or not readable.
    """
    variable = f"AIRFLOW_CONN_{conn_id.upper()}"
    text = os.environ.get(variable)
    if text is None:
        raise InvalidConfiguration(
            f'connection "{conn_id}" is not known',
            detail=f"The environment variable {variable} is not set.",
            hint="Set it to a PostgreSQL URI, or give `dsn` instead of `conn_id` in the configuration.",
        )
    fields = _fields_of_json(conn_id, text) if text.lstrip().startswith("{") else None
    return _without_other_options(conn_id, text) if fields is None else _connection(conn_id, fields).uri


def _fields_of_json(conn_id: str, text: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidConfiguration(
            f'connection "{conn_id}" is not readable JSON', detail=f"{error.msg} at character {error.pos}."
        ) from None
    return found


def _connection(conn_id: str, fields: Mapping[str, Any]) -> AirflowConnection:
    check_type(conn_id, fields.get("conn_type", "postgres"))
    extra = fields.get("extra") or {}
    names = ("host", "port", "login", "password", "schema")
    return AirflowConnection(
        **{name: str(fields.get(name) or "") for name in names},
        extra=_fields_of_json(conn_id, extra) if isinstance(extra, str) else extra,
    )


def _without_other_options(conn_id: str, text: str) -> str:
    """A URI as Airflow or libpq has it, with what libpq knows; what is no URI of PostgreSQL's as it is."""
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in CONNECTION_TYPES:
        return text
    location, _, query = rest.partition("?")
    extra: dict[str, object] = dict(parse_qsl(query, keep_blank_values=True))
    extra |= _fields_of_json(conn_id, str(extra.pop("__extra__", "{}")))
    return f"postgresql://{location}{libpq_query(extra, LIBPQ_OPTIONS | ADDRESS_OPTIONS)}"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Endpoint(_Strict):
    conn_id: str | None = None
    dsn: str | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.conn_id is None) == (self.dsn is None):
            raise ValueError("exactly one of conn_id and dsn must be given")
        return self


class _Publisher(_Endpoint):
    slot: SlotName | None = None
    change_log: str
    streaming: bool = False
    two_phase: bool = False
    max_changes_per_pull: Annotated[int, Field(ge=1)] = 2_000_000
    max_retained_wal: Size | None = None
    event_trigger: bool = True
    keep: Duration = DEFAULT_KEEP


class _Subscription(_Endpoint):
    publisher: Name
    publications: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
    copy_data: bool = True
    origin: Literal["any", "none"] = "any"
    on_conflict: Literal["error", "overwrite", "skip"] = "error"
    snapshot_chunk: Size = 256 * 1024 * 1024
    snapshot_readers: Annotated[int, Field(ge=1)] | None = None
    snapshot_rate: Size | None = None
    on_failure: Literal["subscription", "table"] = "subscription"
    unchanged_toast: Literal["exact", "native"] = "exact"
    lock_timeout: Annotated[float, Field(ge=0, le=86400)] = 10.0
    run_as_owner: bool = False
    group: Name | None = None


class _Group(_Strict):
    schedule: str | None = None
    spark_conn_id: str = "spark_default"
    spark_conf: dict[str, str | int | float | bool] = {}


class _Timeouts(_Strict):
    connect: Limit | None = None
    tcp_user: Limit | None = None
    lock: Limit | None = None
    statement: Limit | None = None
    answer: Wait | None = None
    page: Wait | None = None
    task: Duration | None = None
    run: Duration | None = None


class _File(_Strict):
    publishers: Annotated[dict[Name, _Publisher], Field(min_length=1)]
    subscriptions: dict[Name, _Subscription] = {}
    groups: dict[Name, _Group] = {}
    timeouts: _Timeouts = _Timeouts()


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
    max_retained_wal: int | None = None
    """In bytes; None: as much as the server lets it."""
    event_trigger: bool = True
    """Whether `setup` installs event triggers on the publisher, where it may."""
    keep: dt.timedelta = DEFAULT_KEEP
    """How long ago a transaction was committed that `prune` may drop, where nobody needs it."""


@dataclass(frozen=True, slots=True)
class SubscriptionConfig:
    """A subscription, its target and its group."""

    subscription: Subscription
    conn_id: str | None
    dsn_text: str | None = field(repr=False)
    group: str
    snapshot_chunk: int = 256 * 1024 * 1024
    """Bytes of a table that a snapshot reads in one piece: what a kill can lose, for each reader."""
    snapshot_readers: int | None = None
    """Most tasks of a snapshot at a time, each with one connection to both sides; None: Spark's cores."""
    snapshot_rate: int | None = None
    """Bytes per second that all readers of a snapshot together may copy; None: as fast as it goes."""

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


@dataclass(frozen=True, slots=True)
class Timeouts(SessionTimeouts):
    """How long sessions wait, and what else waits; 0 is no limit for a task and a run."""

    answer: dt.timedelta = dt.timedelta(seconds=10)
    """How long `status` and the watch wait for servers to say how they are."""
    page: dt.timedelta = dt.timedelta(seconds=3)
    """How long the page in Airflow waits for that, before it shows what they said last."""
    task: dt.timedelta = dt.timedelta(days=1)
    """How long one try of a task may take."""
    run: dt.timedelta = dt.timedelta(days=4)
    """How long a run of a DAG may take: every try of its tasks."""


@dataclass(frozen=True, slots=True)
class Config:
    """The whole file, checked; connections are resolved by `dsn_of`."""

    path: Path
    publishers: Mapping[str, PublisherConfig]
    subscriptions: Mapping[str, SubscriptionConfig]
    groups: Mapping[str, GroupConfig]
    connections: Resolver = connection_from_environment
    timeouts: Timeouts = field(default_factory=Timeouts)

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
        return tuple(s for s in self.subscriptions.values() if s.subscription.publisher == publisher)

    def wants_origin_none(self, publisher: str) -> bool:
        """Whether a subscription of the publisher must not see changes with an origin (R8.19)."""
        subscriptions = self.subscriptions_of(publisher)
        return any(each.subscription.origin is OriginPolicy.NONE for each in subscriptions)

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

    def _named(self, items: Mapping[str, _T], name: str, kind: str) -> _T:
        try:
            return items[name]
        except KeyError:
            known = ", ".join(sorted(items)) or "none"
            raise InvalidConfiguration(
                f'{kind} "{name}" is not configured', detail=f"{self.path} has: {known}."
            ) from None


def load_config(
    path: str | Path | None = None, *, connections: Resolver = connection_from_environment
) -> Config:
    """Read and check a configuration file: `path`, else `CDC_REPLAY_CONFIG`, else `cdc_replay.yaml`.

    Raises:
        InvalidConfiguration: naming file, line and key of what is wrong.
    """
    file = Path(path or os.environ.get(VARIABLE) or DEFAULT_FILE).absolute()
    tree = _compose(file)
    lines = dict(_lines(tree))
    content = _expand(tree, file)
    try:
        parsed = _File.model_validate(content)
    except ValidationError as error:
        raise _invalid(file, lines, error) from None
    return _checked(file, lines, parsed, connections)


def _compose(file: Path) -> yaml.Node:
    text = _read(file)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise InvalidConfiguration(f"{file}, line {line}: not valid YAML: {error.problem}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise InvalidConfiguration(
            f"{file}, line {line}: not valid YAML: character U+{error.character:04X} is not allowed",
            hint="Remove it.",
        ) from None
    except RecursionError:
        raise InvalidConfiguration(f"{file}, line 1: not a configuration: nested too deeply") from None
    if not isinstance(node, yaml.MappingNode):
        raise InvalidConfiguration(
            f"{file}, line 1: not a configuration", hint="The file must have the key `publishers`."
        )
    _check_finite(node, file)
    return node


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InvalidConfiguration(
            f'configuration file "{file}" does not exist',
            hint=f"Give --config PATH, set {VARIABLE}, or write {DEFAULT_FILE} here.",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfiguration(f'configuration file "{file}" cannot be read: {error}') from error


def _check_finite(node: yaml.Node, file: Path, within: frozenset[int] = frozenset()) -> None:
    """An alias of what it is in itself has no end."""
    inside = within | {id(node)}
    for _, line, value in _children(node):
        if id(value) in inside:
            raise InvalidConfiguration(
                f"{file}, line {line}: a value contains itself by an alias",
                hint="Write a value in place of the alias.",
            )
        _check_finite(value, file, inside)


def _children(node: yaml.Node) -> Iterator[tuple[str, int, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield str(key.value), key.start_mark.line + 1, value
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield str(index), value.start_mark.line + 1, value


def _lines(node: yaml.Node, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    for key, line, value in _children(node):
        yield (*path, key), line
        yield from _lines(value, (*path, key))


def _expand(node: yaml.Node, file: Path) -> Any:  # noqa: ANN401 - YAML is any of these
    """The node's plain value with `${NAME}` replaced, refusing keys that are given twice."""
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key, line, value in _children(node):
            if key in result:
                raise InvalidConfiguration(f'{file}, line {line}: key "{key}" is given twice')
            result[key] = _expand(value, file)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_expand(value, file) for _, _, value in _children(node)]
    if _REFERENCE.search(node.value):
        return _REFERENCE.sub(
            lambda match: _environment(match[1], file, node.start_mark.line + 1), node.value
        )
    return _scalar(node, file)


def _scalar(node: yaml.Node, file: Path) -> Any:  # noqa: ANN401 - YAML is any of these
    """The value that the text stands for; an empty one is null."""
    try:
        return yaml.constructor.SafeConstructor().construct_document(node)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError):
        # The last three come from texts that only look like, or are tagged as, a date or a number.
        raise InvalidConfiguration(
            f"{file}, line {node.start_mark.line + 1}: not valid YAML: the value is not of the type"
            f" {node.tag.removeprefix('tag:yaml.org,2002:')}",
            hint="Put it in quotes if it is a text.",
        ) from None


def _environment(name: str, file: Path, line: int) -> str:
    try:
        return os.environ[name]
    except KeyError:
        raise InvalidConfiguration(
            f'{file}, line {line}: environment variable "{name}" is not set',
            hint=f"Set it, or replace ${{{name}}} by a value.",
        ) from None


def _invalid(
    file: Path, lines: Mapping[tuple[str, ...], int], error: ValidationError
) -> InvalidConfiguration:
    """One message with every problem; values are not repeated, a DSN could be among them."""
    problems = []
    for item in error.errors(include_url=False, include_input=False):
        path = tuple(str(part) for part in item["loc"] if part != "[key]")
        line = next((lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines), 1)
        message = {
            "extra_forbidden": "unknown key",
            "missing": "the key is missing",
        }.get(item["type"], item["msg"].removeprefix("Value error, "))
        problems.append(f"line {line}: {'.'.join(path) or 'file'}: {message}")
    return InvalidConfiguration(f"{file}, {problems[0]}", detail="; ".join(problems[1:]) or None)


def _checked(
    file: Path, lines: Mapping[tuple[str, ...], int], parsed: _File, connections: Resolver
) -> Config:
    for path, message in _contradictions(file, parsed):
        raise InvalidConfiguration(f"{file}, line {lines.get(path, 1)}: {'.'.join(path)}: {message}")
    publishers = {name: _publisher(name, given, file) for name, given in parsed.publishers.items()}
    subscriptions = {name: _subscription(name, given) for name, given in parsed.subscriptions.items()}
    groups = {
        name: _group(name, parsed.groups.get(name, _Group()), subscriptions)
        for name in dict.fromkeys(s.group for s in subscriptions.values())
    }
    timeouts = Timeouts(**parsed.timeouts.model_dump(exclude_none=True))
    return Config(file, publishers, subscriptions, groups, connections, timeouts)


def _contradictions(file: Path, parsed: _File) -> Iterator[tuple[tuple[str, ...], str]]:
    """What no single key can say: key path and message."""
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
    for name in parsed.groups:
        if name not in publisher_of_group:
            yield ("groups", name), "no subscription is in this group"


def _slots_without_name(parsed: _File) -> Iterator[tuple[tuple[str, ...], str]]:
    for name, given in parsed.publishers.items():
        if given.slot is None and len(_default_slot(name)) > LONGEST_SLOT_NAME:
            yield ("publishers", name), "the name is too long for that of its slot: give `slot`"


def _shared_change_logs(file: Path, parsed: _File) -> Iterator[tuple[tuple[str, ...], str]]:
    owners: dict[str, str] = {}
    for name, given in parsed.publishers.items():
        owner = owners.setdefault(_change_log(given, file).rstrip("/"), name)
        if owner != name:
            message = f'publisher "{owner}" has the same change log: give each its own'
            yield ("publishers", name, "change_log"), message


def _shared_slots(parsed: _File) -> Iterator[tuple[tuple[str, ...], str]]:
    """What is read by one is missing in the log of the other; `setup` and `capture` see more of this."""
    owners: dict[tuple[str | None, str | None, str], str] = {}
    for name, given in parsed.publishers.items():
        owner = owners.setdefault((given.conn_id, given.dsn, given.slot or _default_slot(name)), name)
        if owner != name:
            message = f'publisher "{owner}" reads the same replication slot: give each its own'
            yield ("publishers", name, "slot"), message


def _default_slot(publisher: str) -> str:
    return f"cdc_replay_{re.sub(r'[^a-z0-9_]', '_', publisher.lower())}"


def _change_log(given: _Publisher, file: Path) -> str:
    log = given.change_log
    return log if _OBJECT_STORE.match(log) else str((file.parent / log).resolve())


def _publisher(name: str, given: _Publisher, file: Path) -> PublisherConfig:
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
    )


def _subscription(name: str, given: _Subscription) -> SubscriptionConfig:
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
    )


def _group(name: str, given: _Group, subscriptions: Mapping[str, SubscriptionConfig]) -> GroupConfig:
    members = [s for s in subscriptions.values() if s.group == name]
    return GroupConfig(
        name=name,
        publisher=members[0].subscription.publisher,
        subscriptions=tuple(member.name for member in members),
        schedule=given.schedule,
        spark_conn_id=given.spark_conn_id,
        spark_conf={key: _spark_text(value) for key, value in given.spark_conf.items()},
    )


def _spark_text(value: str | float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
