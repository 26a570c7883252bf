"""What validations have proven of each table: `cdc_replay.table_proof`, and over time, `proof_history`.

`table_proof` has one row per table, with one element per bucket in each array (`model.proof`). Only what a
validation has compared is changed, so a part of the tables, or of their rows, advances that part alone.

`proof_history` gets a row per compared table and validation. Each append deletes a few of the table's oldest
rows: those older than `PROOF_DAYS_KEPT`, or beyond the newest `ROWS_KEPT_PER_TABLE`.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from psycopg.rows import class_row

from cdc_replay.model.lsn import Lsn
from cdc_replay.model.proof import (
    BucketProof,
    Evidence,
    ProofSummary,
    ProvenPoint,
    TableProof,
)
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import Result
from cdc_replay.postgres.connection import Connection
from cdc_replay.subscriber.history import PROOF_DAYS_KEPT
from cdc_replay.subscriber.state_schema import is_complete
from cdc_replay.subscriber.subscription_tables import known_tables

ROWS_KEPT_PER_TABLE: Final = 2000

_PROOFS: Final = """
    select relation::oid::bigint, is_published, definition, owed, turns, lsns::text[], times, are_equal
    from cdc_replay.table_proof where subscription = %s
"""

_SUMMARIES: Final = """
    select proof.relation::oid::bigint, proof.is_published, bucket.*
    from cdc_replay.table_proof as proof
    cross join lateral (
        select pg_catalog.count(*) filter (where lsn is null),
            pg_catalog.count(*) filter (where not is_equal),
            pg_catalog.min(lsn)::text, pg_catalog.min(at), pg_catalog.max(at)
        from unnest(proof.lsns, proof.times, proof.are_equal) as buckets (lsn, at, is_equal)
    ) as bucket
    where proof.subscription = %s
"""

# Two validations may end at the same time: the second waits here, and adds to what the first has stored.
_LOCK: Final = "select from cdc_replay.subscription where name = %s for no key update"

_STORE: Final = """
    insert into cdc_replay.table_proof
        (subscription, relation, is_published, definition, owed, turns, lsns, times, are_equal)
    select %(subscription)s, %(relation)s::oid, %(is_published)s, %(definition)s, %(owed)s, %(turns)s,
        %(lsns)s::text[]::pg_lsn[], %(times)s, %(are_equal)s
    where exists (
        select from cdc_replay.subscription_table
        where subscription = %(subscription)s and relation::oid = %(relation)s::oid
    )
    on conflict (subscription, relation)
    do update set is_published = excluded.is_published, definition = excluded.definition,
        owed = excluded.owed, turns = excluded.turns, lsns = excluded.lsns, times = excluded.times,
        are_equal = excluded.are_equal
"""

_APPEND: Final = """
    with
    oldest as (
        select finished, number from cdc_replay.proof_history
        where subscription = %(subscription)s and schema_name = %(schema)s and table_name = %(table)s
        order by finished, number limit 10
    ),
    newest as (
        select finished, number from cdc_replay.proof_history
        where subscription = %(subscription)s and schema_name = %(schema)s and table_name = %(table)s
        order by finished desc, number desc offset %(rows_kept)s - 1 limit 1
    ),
    expired as (
        delete from cdc_replay.proof_history as history using oldest
        where subscription = %(subscription)s and schema_name = %(schema)s and table_name = %(table)s
            and (history.finished, history.number) = (oldest.finished, oldest.number)
            and (history.finished < pg_catalog.clock_timestamp() - %(kept)s
                or (history.finished, history.number) <= (select finished, number from newest))
    )
    insert into cdc_replay.proof_history (subscription, schema_name, table_name, lsn, buckets, row_count,
        differing_rows, bytes, seconds, error, proven_through, proven_at)
    values (%(subscription)s, %(schema)s, %(table)s, %(lsn)s, %(buckets)s, %(row_count)s, %(differing_rows)s,
        %(bytes)s, %(seconds)s, %(error)s, %(proven_through)s, %(proven_at)s)
"""

_HISTORY: Final = """
    select schema_name, table_name, finished, lsn::text, buckets, row_count, differing_rows, bytes, seconds,
        error, proven_through::text, proven_at
    from (
        select proof.*, pg_catalog.row_number() over (
            partition by schema_name, table_name order by finished desc, proof.number desc
        ) as age
        from cdc_replay.proof_history as proof where subscription = %s
    ) as proof
    where age <= %s
    order by schema_name, table_name, age
"""


@dataclass(frozen=True, slots=True)
class StoredProof:
    """A table of the subscription and its proof; `name` is the present or, once dropped, the last one.

    `is_published`: false if no publication of the subscription lists the table any more.
    """

    relation: int
    name: QualifiedName
    proof: TableProof
    is_published: bool = True
    is_present: bool = True
    """Whether the subscriber still has the table."""


@dataclass(frozen=True, slots=True)
class TableSeen:
    """What one validation has seen of a table, for the history; `error`: why it was not compared.

    `evidence` is None if it proves nothing, as after an error.
    """

    name: QualifiedName
    row_count: int
    differing_rows: int
    bytes: int
    seconds: float
    evidence: Evidence | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TableRecord(Result):
    """A row of a table's history; the proof is the table's after that validation."""

    schema_name: str
    table_name: str
    finished: dt.datetime
    lsn: str
    buckets: int
    row_count: int
    differing_rows: int
    bytes: int
    seconds: float
    error: str | None
    proven_through: str | None
    proven_at: dt.datetime | None


def read_proofs(connection: Connection, subscription: str) -> tuple[StoredProof, ...]:
    """The proofs of all tables of the subscription; also of those that no validation has compared.

    Dropped ones come first: a new table may have the name of one.
    """
    stored, nothing = _read_stored(connection, subscription), (TableProof.nothing(), True)
    entries = [
        StoredProof(
            table.relation,
            table.name or table.recorded_name,
            *stored.get(table.relation, nothing),
            is_present=table.name is not None,
        )
        for table in known_tables(connection, subscription)
    ]
    return tuple(sorted(entries, key=lambda entry: entry.is_present))


def read_summaries(connection: Connection, subscription: str) -> dict[QualifiedName, ProofSummary]:
    """The proofs of the tables of a subscription that are published, by present or last name.

    Empty if no validation has recorded any.
    """
    if not is_complete(connection):
        return {}
    stored = {
        relation: (
            is_published,
            ProofSummary(
                never_compared=never,
                differing=differing,
                oldest=None if lsn is None else ProvenPoint(Lsn.parse(lsn), at),
                last_compared=last,
            ),
        )
        for relation, is_published, never, differing, lsn, at, last in connection.execute(
            _SUMMARIES, (subscription,)
        )
    }
    if not stored:
        return {}
    # A new table may have the name of a dropped one, whose proof then counts no more.
    tables = sorted(known_tables(connection, subscription), key=lambda table: table.name is not None)
    summaries = {
        table.name or table.recorded_name: stored.get(table.relation, (True, ProofSummary()))
        for table in tables
    }
    return {name: summary for name, (is_published, summary) in summaries.items() if is_published}


def record_proofs(
    connection: Connection,
    subscription: str,
    lsn: Lsn,
    seen: Sequence[TableSeen],
    *,
    published: Collection[QualifiedName],
    owed: Mapping[QualifiedName, int],
) -> None:
    """Add what a validation at `lsn` has seen to the proofs and to the history, in one transaction.

    `published` are the tables that the publications list; those that were `owed` this many buckets, and not
    reached at all, stay so. A table that is no longer in the subscription is left out.
    """
    with connection.transaction():
        connection.execute(_LOCK, (subscription,))
        stored = {entry.name: entry for entry in read_proofs(connection, subscription)}
        by_name = {table.name: table for table in seen}
        for name, entry in stored.items():
            proof, is_published = entry.proof, name in published
            table = by_name.get(name)
            if table is not None and table.evidence is not None:
                proof = proof.add(table.evidence)
            elif name in owed:
                proof = _owing(proof, owed[name])
            if (proof, is_published) != (entry.proof, entry.is_published):
                _store(connection, subscription, StoredProof(entry.relation, name, proof, is_published))
            if table is not None:
                _append(connection, subscription, lsn, table, proof.summary.proven)


def table_history(
    connection: Connection, subscription: str, limit: int
) -> dict[QualifiedName, tuple[TableRecord, ...]]:
    """The newest rows of the history of each table, the newest first."""
    if not is_complete(connection):
        return {}
    history: dict[QualifiedName, list[TableRecord]] = {}
    with connection.cursor(row_factory=class_row(TableRecord)) as cursor:
        for record in cursor.execute(_HISTORY, (subscription, limit)):
            name = QualifiedName(record.schema_name, record.table_name)
            history.setdefault(name, []).append(record)
    return {name: tuple(records) for name, records in history.items()}


def _owing(proof: TableProof, owed: int) -> TableProof:
    return TableProof(proof.buckets, proof.definition, owed)


def _read_stored(connection: Connection, subscription: str) -> dict[int, tuple[TableProof, bool]]:
    if not is_complete(connection):
        return {}
    return {
        relation: (
            TableProof(
                tuple(
                    None
                    if lsn is None
                    else BucketProof(turn=turn, lsn=Lsn.parse(lsn), at=at, is_equal=is_equal)
                    for turn, lsn, at, is_equal in zip(turns, lsns, times, are_equal, strict=True)
                ),
                definition,
                owed,
            ),
            is_published,
        )
        for relation, is_published, definition, owed, turns, lsns, times, are_equal in connection.execute(
            _PROOFS, (subscription,)
        )
    }


def _store(connection: Connection, subscription: str, stored: StoredProof) -> None:
    buckets = stored.proof.buckets
    connection.execute(
        _STORE,
        {
            "subscription": subscription,
            "relation": stored.relation,
            "is_published": stored.is_published,
            "definition": stored.proof.definition,
            "owed": stored.proof.owed,
            "turns": [None if bucket is None else bucket.turn for bucket in buckets],
            "lsns": [None if bucket is None else str(bucket.lsn) for bucket in buckets],
            "times": [None if bucket is None else bucket.at for bucket in buckets],
            "are_equal": [None if bucket is None else bucket.is_equal for bucket in buckets],
        },
    )


def _append(
    connection: Connection, subscription: str, lsn: Lsn, table: TableSeen, proven: ProvenPoint | None
) -> None:
    connection.execute(
        _APPEND,
        {
            "subscription": subscription,
            "schema": table.name.schema,
            "table": table.name.name,
            "lsn": str(lsn),
            "buckets": 0 if table.evidence is None else len(table.evidence.compared),
            "row_count": table.row_count,
            "differing_rows": table.differing_rows,
            "bytes": table.bytes,
            "seconds": table.seconds,
            "error": table.error,
            "proven_through": None if proven is None else str(proven.lsn),
            "proven_at": None if proven is None else proven.at,
            "kept": dt.timedelta(days=PROOF_DAYS_KEPT),
            "rows_kept": ROWS_KEPT_PER_TABLE,
        },
    )
