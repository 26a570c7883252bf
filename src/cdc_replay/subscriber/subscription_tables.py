"""The tables of a subscription on its subscriber, by oid: state, names, rewrites."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, assert_never

from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.table_state import Copying, Parked, Pending, Ready, TableState
from cdc_replay.postgres.connection import Connection
from cdc_replay.subscriber.state_schema import is_installed

_TABLES: Final = """
    select known.relation::oid::bigint, known.schema_name, known.table_name, namespace.nspname, class.relname,
        known.state, known.lsn::text, known.reason, known.transaction::text
    from cdc_replay.subscription_table as known
    left join pg_catalog.pg_class as class on class.oid = known.relation and class.relkind in ('r', 'p')
    left join pg_catalog.pg_namespace as namespace on namespace.oid = class.relnamespace
    where known.subscription = %s
    order by namespace.nspname, class.relname, known.schema_name, known.table_name
"""


_TABLE_STATE: Final = """
    select state, lsn::text, reason, transaction::text
    from cdc_replay.subscription_table where subscription = %s and relation::oid = %s::oid
"""


_SET_TABLE_STATE: Final = """
    insert into cdc_replay.subscription_table
        (subscription, schema_name, table_name, relation, state, lsn, reason, transaction)
    select %s, namespace.nspname, class.relname, class.oid, %s, %s, %s, %s
    from pg_catalog.pg_class as class
    join pg_catalog.pg_namespace as namespace on namespace.oid = class.relnamespace
    where namespace.nspname = %s and class.relname = %s and class.relkind in ('r', 'p')
    on conflict (subscription, relation)
    do update set state = excluded.state, lsn = excluded.lsn, reason = excluded.reason,
        transaction = excluded.transaction
"""


_ADVANCE_TABLES: Final = """
    update cdc_replay.subscription_table
    set state = 'ready', lsn = %s, reason = null, transaction = null
    where subscription = %s and relation::oid = any(%s::oid[])
"""


_RECORD_NAMES: Final = """
    update cdc_replay.subscription_table as known
    set schema_name = namespace.nspname, table_name = class.relname
    from pg_catalog.pg_class as class
    join pg_catalog.pg_namespace as namespace on namespace.oid = class.relnamespace
    where known.subscription = %s and class.oid = known.relation and known.relation::oid = any(%s::oid[])
        and (known.schema_name, known.table_name) is distinct from (namespace.nspname, class.relname)
"""


# The name is resolved to the table that has it now.
_MARK_REWRITTEN: Final = """
    update cdc_replay.subscription_table set rewritten_at = %s where subscription = %s
        and relation = pg_catalog.to_regclass(pg_catalog.format('%%I.%%I', %s::text, %s::text))
"""


_FORGET_REWRITE: Final = """
    update cdc_replay.subscription_table set rewritten_at = null
    where subscription = %s and rewritten_at is not null
        and relation = pg_catalog.to_regclass(pg_catalog.format('%%I.%%I', %s::text, %s::text))
"""


_REWRITTEN: Final = """
    select namespace.nspname, class.relname, known.rewritten_at::text
    from cdc_replay.subscription_table as known
    join pg_catalog.pg_class as class on class.oid = known.relation
    join pg_catalog.pg_namespace as namespace on namespace.oid = class.relnamespace
    where known.subscription = %s and known.rewritten_at is not null
    order by namespace.nspname, class.relname
"""


@dataclass(frozen=True, slots=True)
class KnownTable:
    """A table of a subscription: oid, the name under which a change last reached it, current name, state.

    `name` is None if the table was dropped on the subscriber.
    """

    relation: int
    recorded_name: QualifiedName
    name: QualifiedName | None
    state: TableState

    @property
    def is_renamed(self) -> bool:
        """The table has another name than the recorded one."""
        return self.name is not None and self.name != self.recorded_name


def known_tables(connection: Connection, subscription: str) -> tuple[KnownTable, ...]:
    """All tables of the subscription, ordered by name."""
    if not is_installed(connection):
        return ()
    return tuple(
        KnownTable(
            relation,
            QualifiedName(schema, name),
            None if present is None else QualifiedName(present_schema, present),
            _state(*stored),
        )
        for relation, schema, name, present_schema, present, *stored in connection.execute(
            _TABLES, (subscription,)
        )
    )


def table_state(connection: Connection, subscription: str, relation: int) -> TableState | None:
    """The state of one table, given by oid; None if it is not the subscription's."""
    row = connection.execute(_TABLE_STATE, (subscription, relation)).fetchone()
    return None if row is None else _state(*row)


def claim_table_state(connection: Connection, subscription: str, relation: int) -> TableState | None:
    """The same; other transactions that claim it wait until the caller's ends."""
    row = connection.execute(_TABLE_STATE + " for update", (subscription, relation)).fetchone()
    return None if row is None else _state(*row)


def table_states(connection: Connection, subscription: str) -> dict[QualifiedName, TableState]:
    """The states of all tables that exist, by current name."""
    tables = known_tables(connection, subscription)
    return {table.name: table.state for table in tables if table.name is not None}


def add_tables(connection: Connection, subscription: str, names: Iterable[QualifiedName]) -> None:
    """Add tables to the subscription as `Pending`, all or none."""
    with connection.transaction():
        for name in names:
            set_table_state(connection, subscription, name, Pending())
        connection.execute(
            "update cdc_replay.subscription set has_tables_listed = true where name = %s", (subscription,)
        )


def tables_are_listed(connection: Connection, subscription: str) -> bool:
    """Whether `add_tables` has run; the list of tables may be empty."""
    if not is_installed(connection):
        return False
    query = "select has_tables_listed from cdc_replay.subscription where name = %s"
    row = connection.execute(query, (subscription,)).fetchone()
    return row is not None and bool(row[0])


def set_table_state(
    connection: Connection, subscription: str, name: QualifiedName, state: TableState
) -> None:
    """Store the state of the table that has this name now; no effect if there is none."""
    connection.execute(_SET_TABLE_STATE, (subscription, *_stored(state), name.schema, name.name))


def advance_tables(
    connection: Connection, subscription: str, relations: Iterable[int], applied_lsn: Lsn
) -> None:
    """Set these tables, given by oid, to `Ready(applied_lsn)` in one statement."""
    connection.execute(_ADVANCE_TABLES, (str(applied_lsn), subscription, list(relations)))


def mark_rewritten(
    connection: Connection, subscription: str, names: Iterable[QualifiedName], commit_lsn: Lsn
) -> None:
    """Record that the publisher rewrote these tables and their values were not compared since (R11.9)."""
    for name in names:
        connection.execute(_MARK_REWRITTEN, (str(commit_lsn), subscription, name.schema, name.name))


def clear_rewrite(connection: Connection, subscription: str, name: QualifiedName) -> None:
    """Record that the table's values were compared or copied after the rewrite."""
    connection.execute(_FORGET_REWRITE, (subscription, name.schema, name.name))


def rewritten_tables(connection: Connection, subscription: str) -> dict[QualifiedName, Lsn]:
    """The tables that were not compared since a rewrite, with the end LSN of the rewriting transaction."""
    if not is_installed(connection):
        return {}
    rows = connection.execute(_REWRITTEN, (subscription,))
    return {QualifiedName(schema, name): Lsn.parse(lsn) for schema, name, lsn in rows}


def record_names(connection: Connection, subscription: str, relations: Iterable[int]) -> None:
    """Record the current names of these tables, given by oid, as those under which changes reached them."""
    connection.execute(_RECORD_NAMES, (subscription, list(relations)))


def remove_table(connection: Connection, subscription: str, relation: int) -> None:
    """Remove the table, given by oid, from the subscription; its rows stay (R7.13)."""
    connection.execute(
        "delete from cdc_replay.subscription_table where subscription = %s and relation = %s::oid",
        (subscription, relation),
    )


def _stored(state: TableState) -> tuple[str, str | None, str | None, str | None]:
    match state:
        case Pending():
            return "pending", None, None, None
        case Copying(consistent_point):
            return "copying", str(consistent_point), None, None
        case Ready(applied_lsn):
            return "ready", str(applied_lsn), None, None
        case Parked(applied_lsn, reason, transaction):
            return "parked", str(applied_lsn), reason, str(transaction)
    assert_never(state)


def _state(word: str, lsn: str | None, reason: str | None, transaction: str | None) -> TableState:
    match word, lsn, reason, transaction:
        case "copying", str(), _, _:
            return Copying(Lsn.parse(lsn))
        case "ready", str(), _, _:
            return Ready(Lsn.parse(lsn))
        case "parked", str(), str(), str():
            return Parked(Lsn.parse(lsn), reason, Lsn.parse(transaction))
        case _:
            return Pending()
