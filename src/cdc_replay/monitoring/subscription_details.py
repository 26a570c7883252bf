"""What the page shows of one subscription beside its status: tables, parked things, windows, validations."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cdc_replay.config import Config
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.proof import ProofSummary, subscription_proof
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import Result
from cdc_replay.model.table_state import Copying, Parked, Pending, Ready
from cdc_replay.postgres.connection import Connection, connect_with_deadline
from cdc_replay.subscriber import history, proofs, subscription_records, subscription_tables
from cdc_replay.subscriber.copy_definitions import read_copy_definitions
from cdc_replay.subscriber.history import HistoryPoint, TimeRange, ValidationRecord, WindowRecord
from cdc_replay.subscriber.proofs import TableRecord
from cdc_replay.subscriber.subscription_tables import KnownTable

WINDOWS_SHOWN = 50
VALIDATIONS_SHOWN = 50
TABLE_VALIDATIONS_SHOWN = 20


@dataclass(frozen=True, slots=True)
class ParkedObject(Result):
    """A parked subscription (`table` is None) or table, and the transaction that it is parked before."""

    table: str | None
    position: Lsn
    transaction: Lsn
    reason: str


@dataclass(frozen=True, slots=True)
class TableDetails(Result):
    """A table: `filters` are those of its last copy, combined with OR; None if every row passes."""

    table: str
    state: str
    applied_lsn: Lsn | None
    filters: tuple[str, ...] | None
    columns: tuple[str, ...]
    proof: str | None = None
    """What validations have proven of it, in words; None if nothing is recorded."""
    proven_through: Lsn | None = None
    proven_at: dt.datetime | None = None
    validations: tuple[TableRecord, ...] = ()
    """Its newest validations, the newest first."""


@dataclass(frozen=True, slots=True)
class SubscriptionDetails(Result):
    """The newest windows and validations come first; the proof is the oldest of the tables'."""

    subscription: str
    tables: tuple[TableDetails, ...]
    parked: tuple[ParkedObject, ...]
    points: tuple[HistoryPoint, ...]
    windows: tuple[WindowRecord, ...]
    validations: tuple[ValidationRecord, ...]
    proven_through: Lsn | None = None
    proven_at: dt.datetime | None = None


def subscription_details(
    config: Config, subscription: str, time_range: TimeRange, seconds: float
) -> SubscriptionDetails:
    """Read them from the subscriber, which may take about `seconds` to answer.

    Raises:
        CdcReplayError, psycopg.Error: if it does not answer.
    """
    dsn = config.dsn_of(config.subscription(subscription))
    with connect_with_deadline(dsn, purpose=f"page {subscription}", seconds=seconds) as connection:
        known = subscription_tables.known_tables(connection, subscription)
        summaries = proofs.read_summaries(connection, subscription)
        proven = subscription_proof(summaries.values())
        return SubscriptionDetails(
            subscription,
            tuple(_tables(connection, subscription, known, summaries)),
            tuple(_parked(connection, subscription, known)),
            history.history_points(connection, subscription, time_range),
            history.last_windows(connection, subscription, WINDOWS_SHOWN),
            history.last_validations(connection, subscription, VALIDATIONS_SHOWN),
            None if proven is None else proven.lsn,
            None if proven is None else proven.at,
        )


def _tables(
    connection: Connection,
    subscription: str,
    known: tuple[KnownTable, ...],
    summaries: Mapping[QualifiedName, ProofSummary],
) -> Iterator[TableDetails]:
    copied = read_copy_definitions(connection, subscription)
    validated = proofs.table_history(connection, subscription, TABLE_VALIDATIONS_SHOWN)
    for table in known:
        definition = copied[table.name].definition if table.name in copied else None
        filters = None if definition is None or definition.filters is None else definition.filters
        name = table.name or table.recorded_name
        summary = summaries.get(name)
        proven = None if summary is None else summary.proven
        yield TableDetails(
            table=str(name),
            state="dropped" if table.name is None else _word(table),
            applied_lsn=table.state.applied_lsn if isinstance(table.state, Ready | Parked) else None,
            filters=None if filters is None else tuple(sorted(filters)),
            columns=() if definition is None else tuple(sorted(definition.columns)),
            proof=None if summary is None else summary.describe(),
            proven_through=None if proven is None else proven.lsn,
            proven_at=None if proven is None else proven.at,
            validations=validated.get(name, ()),
        )


def _word(table: KnownTable) -> str:
    match table.state:
        case Pending():
            return "waiting"
        case Copying():
            return "copying"
        case Ready():
            return "ready"
        case Parked():
            return "parked"


def _parked(
    connection: Connection, subscription: str, known: tuple[KnownTable, ...]
) -> Iterator[ParkedObject]:
    record = subscription_records.subscription_record(connection, subscription)
    if record is not None and record.parked_at is not None and record.parked_transaction is not None:
        yield ParkedObject(None, record.parked_at, record.parked_transaction, record.parked_reason or "")
    for table in known:
        if isinstance(table.state, Parked):
            name, state = table.name or table.recorded_name, table.state
            yield ParkedObject(str(name), state.applied_lsn, state.transaction, state.reason)
