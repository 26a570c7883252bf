"""The keys of a configuration file: types, defaults, and what each one means.

The attribute docstrings are the reference: `docs/configuration.md` is generated from them, and their links
are relative to it.
"""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

from cdc_replay.model.duration import parse_duration
from cdc_replay.model.problems import Bounds
from cdc_replay.model.size import parse_size
from cdc_replay.model.validation_scope import parse_share

LONGEST_SLOT_NAME: Final = 63


def _not_relative(name: str) -> str:
    # Reports of a subscription are in a folder of its name.
    if name in {".", ".."}:
        raise ValueError(f'"{name}" is not a name: it stands for a folder')
    return name


def _lag(text: str) -> str:
    Bounds.of_lag(text)
    return text


def _folder(uri: str) -> str:
    if uri.startswith("file:") and "%00" in uri:
        raise ValueError("not the name of a folder: it has the character U+0000")
    return uri


Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,60}$"), AfterValidator(_not_relative)]
SlotName = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9_]+$", min_length=1, max_length=LONGEST_SLOT_NAME)
]
Pool = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^\S(.*\S)?$")]
Size = Annotated[int, BeforeValidator(lambda size: parse_size(str(size))), Field(ge=1)]
Duration = Annotated[dt.timedelta, BeforeValidator(lambda duration: parse_duration(str(duration)))]
Lag = Annotated[str, AfterValidator(_lag)]
ConnId = Annotated[str, StringConstraints(min_length=1, max_length=250, pattern=r"^[\w.-]+$")]
Address = Annotated[
    str,
    StringConstraints(
        min_length=3, max_length=254, pattern=r"^[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]+@[A-Za-z0-9.-]+$"
    ),
]
Share = Annotated[float, BeforeValidator(lambda share: parse_share(str(share)))]
Limit = Annotated[Duration, Field(le=dt.timedelta(days=20))]
"""The server counts milliseconds in 31 bits."""
Wait = Annotated[Limit, Field(ge=dt.timedelta(seconds=1))]


def _table_name(name: str) -> str:
    schema, dot, table = name.partition(".")
    if not (schema and dot and table):
        raise ValueError("not a table name: give it as SCHEMA.TABLE")
    return name


TableName = Annotated[str, AfterValidator(_table_name)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class _Endpoint(_Strict):
    conn_id: str | None = None
    """an Airflow [connection](#connections); exactly one of `conn_id` and `dsn`"""
    dsn: str | None = None
    """a libpq DSN or URI, with a percent-encoded password"""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.conn_id is None) == (self.dsn is None):
            raise ValueError("exactly one of conn_id and dsn must be given")
        return self


class PublisherAlarms(_Strict):
    """Bounds of one publisher."""

    max_retained_wal: Size | None = None
    """more WAL that the slot retains is an alarm; default: that of `alarms`"""


class SubscriptionAlarms(_Strict):
    """Bounds of one subscription."""

    max_lag: Lag | None = None
    """a lag above this time or size, such as `5min` or `1GB`, is an alarm; default: that of `alarms`"""
    max_proof_age: Duration | None = None
    """a last validation that is older, or missing, is an alarm; default: that of `alarms`"""


class Publisher(_Endpoint):
    """A publisher, its slot and its change log."""

    slot: SlotName | None = None
    """the replication slot: lower-case letters, digits and `_`; default: `cdc_replay_NAME`, where other
    characters of NAME become `_`"""
    change_log: Annotated[str, AfterValidator(_folder)]
    """a folder, or an [object store](how-to/object-store.md) (`s3://`, `gs://`, `az://`); each publisher
    needs its own"""
    streaming: bool = False
    """let pgoutput stream transactions that exceed its memory (256 MB, see
    [retention](how-to/limit-wal.md)) before they commit: a backlog of such is captured in less time, but each
    capture while one is open is sent it again"""
    two_phase: bool = False
    """create the slot with two-phase decoding; an existing slot cannot be changed"""
    max_changes_per_pull: Annotated[int, Field(ge=1)] = 2_000_000
    """upper bound of one pull in messages, or of each part if it is read in two; a transaction is never
    split; 512 MiB of WAL end a pull as well, and alone with `streaming`, see
    [retention](how-to/limit-wal.md)"""
    max_retained_wal: Size | None = None
    """a size such as `50GB`; default: no limit. A slot that retains more WAL after a capture is dropped, see
    [retention](how-to/limit-wal.md)"""
    event_trigger: bool = True
    """`setup` installs event triggers on the publisher if its role may; a changed definition then takes
    effect at its own WAL position, see [changed definitions](created-objects.md#changed-definitions)"""
    pool: Pool | None = None
    """Airflow pool of the tasks that read the slot, see [pools](airflow.md#pools); default: `default_pool`"""
    keep: Duration = dt.timedelta(days=7)
    """history that `prune` keeps beyond what subscriptions need: a whole number of `d`, `h`, `min` or `s`, or
    `0`"""
    alarms: PublisherAlarms = PublisherAlarms()
    """[bounds](how-to/alarms.md) of this publisher"""


class TableValidation(_Strict):
    """How a table is validated."""

    every: Duration | None = None
    """how often `validate --due` and the DAG compare the table, such as `7d`; default: each time"""
    sample: Share | None = None
    """the share of its rows that one such run compares, such as `5%`, those that were compared longest ago;
    default: all. After 100 % divided by it, rounded up, runs all rows have been compared"""
    max_proof_age: Duration | None = None
    """a validation fails while the last proof of all rows of the table is older, also if the run does not
    compare it; so does `status --check`; default: no limit"""


class Validation(TableValidation):
    """How the tables of a subscription are validated."""

    max_seconds: Annotated[float, Field(gt=0)] | None = None
    """budget of such a run in seconds of comparing: what it does not reach is named, and comes first in the
    next run; default: none"""
    max_bytes: Size | None = None
    """budget of such a run in bytes of the publisher's tables on disk, such as `50GB`; default: none"""
    tables: dict[TableName, TableValidation] = {}
    """tables by name as `SCHEMA.TABLE`, each with `every`, `sample` and `max_proof_age` of its own"""


class Subscription(_Endpoint):
    """A subscription, its target and its group."""

    publisher: Name
    """a name from `publishers`"""
    publications: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
    """publications of that publisher; their row filters are OR-ed by PostgreSQL's rules"""
    copy_data: bool = True
    """copy existing rows; `false`: replay changes from now on only"""
    origin: Literal["any", "none"] = "any"
    """`none`: only changes that were made on the publisher itself"""
    on_conflict: Literal["error", "overwrite", "skip"] = "error"
    """`error`, `overwrite` or `skip`, see [conflicts](how-to/conflicts.md)"""
    on_failure: Literal["subscription", "table"] = "subscription"
    """what is parked when the subscriber rejects a change permanently: `subscription` or `table`, see
    [parking](how-to/parked.md)"""
    unchanged_toast: Literal["exact", "native"] = "exact"
    """what to do about an unchanged TOAST value that can no longer be found (R4.6): `exact` stores nothing
    and [parks](how-to/parked.md#unsent-values); `native` stores NULL"""
    lock_timeout: Annotated[float, Field(ge=0, le=86400)] = 10.0
    """seconds that a window waits for each lock on the subscriber; 0: no limit"""
    run_as_owner: bool = False
    """`false`: code of the subscriber's tables (defaults, checks, triggers) runs with the rights of the
    table's owner; `true`: with those of the connecting role, see [security](security.md#code-of-owners)"""
    report_values: Literal["keys", "all"] = "keys"
    """what validation reports show of differing rows: `keys`, or `all` values of both sides, up to 200
    characters each"""
    validation: Validation = Validation()
    """what a [scheduled validation](how-to/validate.md) compares, and how old a proof may be; its keys are
    below"""
    snapshot_chunk: Size = 256 * 1024 * 1024
    """size of the chunks in which a snapshot reads a table, such as `256MB`; a killed reader loses one
    chunk"""
    snapshot_readers: Annotated[int, Field(ge=1)] | None = None
    """maximum number of concurrent readers of a snapshot, each with a connection to both sides; default: the
    number of Spark's cores"""
    snapshot_rate: Size | None = None
    """limit for all readers of a snapshot together in bytes per second, such as `50MB`; default: no limit"""
    group: Name | None = None
    """subscriptions of a group are replayed by one Spark application; a group has one publisher; default: the
    publisher's name"""
    alarms: SubscriptionAlarms = SubscriptionAlarms()
    """[bounds](how-to/alarms.md) of this subscription"""


class Group(_Strict):
    """The subscriptions of one publisher that one Spark application replays together."""

    schedule: str | None = None
    """Airflow schedule of the group's replay DAG; default: on new changes"""
    spark_conn_id: str = "spark_default"
    """Airflow's Spark connection, of type `spark` or `spark_connect`"""
    follow: Limit | None = None
    """how long each replay in Airflow goes on, and captures and applies what is committed meanwhile, see
    [following](how-to/warm-spark.md#follow); default: it ends with what the log has when it starts"""
    pool: Pool | None = None
    """Airflow pool of the tasks that work on the group's subscribers, see [pools](airflow.md#pools); default:
    `default_pool`"""
    spark_conf: dict[str, str | int | float | bool] = {}
    """Spark settings; a value of `spark.driver.extraJavaOptions` replaces `-XX:TieredStopAtLevel=1
    -XX:+UseSerialGC`"""


class Timeouts(_Strict):
    """Overrides of the defaults that `cdc_replay.config.Timeouts` has."""

    connect: Limit | None = None
    """how long to wait for a host"""
    tcp_user: Limit | None = None
    """`tcp_user_timeout`: how long sent data may stay unacknowledged. It also ends a COPY whose server stops
    reading while it waits for a lock. `0`: the system's default, about 15 minutes on Linux"""
    lock: Limit | None = None
    """`lock_timeout` of sessions that move data, where `subscriptions.NAME.lock_timeout` does not apply"""
    statement: Limit | None = None
    """`statement_timeout` of the same sessions; a COPY or an index build of a large table takes long"""
    answer: Wait | None = None
    """how long `status` and the watch DAG wait for each server's answer, statements and locks included"""
    page: Wait | None = None
    """the same for the status page in Airflow, which then shows the last known answer"""
    task: Duration | None = None
    """limit for one try of an Airflow task; the try is stopped and repeated"""
    run: Duration | None = None
    """limit for a DAG run, all tries included"""


class Email(_Strict):
    """Mail by an SMTP server."""

    to: Annotated[list[Address], Field(min_length=1, max_length=50)]
    """addresses"""
    sender: Address | None = Field(default=None, alias="from")
    """the sender; default: `from_email` in the extra of the connection, or its login"""
    conn_id: ConnId = "smtp_default"
    """an Airflow connection of type `smtp`, or `AIRFLOW_CONN_<ID>` in the environment"""


class Webhook(_Strict):
    """A POST of JSON."""

    conn_id: ConnId
    """an Airflow connection of type `http` with the address, or `AIRFLOW_CONN_<ID>` in the environment; its
    password, if there is one, is sent as a bearer token"""
    format: Literal["json", "slack"] = "json"
    """`json`: subject, text and each alarm as an object; `slack`: a text, for Slack and chats that take the
    same"""


class Channel(_Strict):
    """Where alarms are sent; exactly one of the keys."""

    email: Email | None = None
    """mail"""
    webhook: Webhook | None = None
    """a webhook"""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.email is None) == (self.webhook is None):
            raise ValueError("exactly one of email and webhook must be given")
        return self


class Alarms(_Strict):
    """Who is told of what, see [alarms](how-to/alarms.md)."""

    notify: Annotated[list[Channel], Field(max_length=20)] = []
    """channels, each an `email` or a `webhook`; without one nobody is told"""
    max_lag: Lag | None = None
    """as `status --check --max-lag`: a lag above this time or size, such as `5min` or `1GB`, is an alarm;
    default: none"""
    max_proof_age: Duration | None = None
    """as `status --check --max-proof-age`: a last validation that is older, or missing, is an alarm; default:
    none"""
    max_retained_wal: Size | None = None
    """more WAL that a slot retains is an alarm; default: none, but a slot near lost always is one"""
    patience: Duration = dt.timedelta(minutes=2)
    """a server or a log that does not answer, or a replay that failed, is told only if it lasts so long; an
    alarm is over when it is gone for so long"""
    link: Annotated[str, StringConstraints(pattern=r"^https?://[^\s@]+$", max_length=500)] | None = None
    """the link of alarms that `cdc-replay alarms` sends; those of Airflow link to its pages"""


class File(_Strict):
    """A configuration file."""

    publishers: Annotated[dict[Name, Publisher], Field(min_length=1)]
    subscriptions: dict[Name, Subscription] = {}
    groups: dict[Name, Group] = {}
    timeouts: Timeouts = Timeouts()
    alarms: Alarms = Alarms()
