"""Statements on a target that run with the rights of its owner, and cannot get back to ours (R8.21).

A bare SET ROLE can be undone by the code that it runs, and what a function SECURITY DEFINER leaves behind,
such as settings, cursors WITH HOLD and deferred triggers, comes to run with our rights later. A native apply
worker switches to the owner in a *security-restricted operation*, which rules out all of that. There is one
that SQL can enter: REFRESH MATERIALIZED VIEW runs the query of the view as the view's owner, in such an
operation, and takes back the settings that were changed in it. So, within the caller's transaction:

    create schema s, for this transaction only; the owner may use it
    as the owner: create function s.run(), which executes the statement in a setting
    as the owner: create materialized view s.call as select s.run() with no data
    for each statement: as the owner, refresh materialized view s.call; what it came to is in a table of ours
    drop schema s

Whatever the owner's code does to these objects, a refresh runs nothing with our rights. Only the number of
rows that the owner's statements report is the owner's word. An owner that may become our role anyway is not
restricted, as natively: its function is called after a plain SET ROLE.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, LiteralString, Protocol

from psycopg import sql

from cdc_replay.errors import MissingPrivilege
from cdc_replay.postgres.connection import Connection, translated_errors
from cdc_replay.subscriber.owners import CANNOT_BECOME, ActingRole, Rights, lock_tables, read_acting_roles
from cdc_replay.subscriber.target_checks import check_names
from cdc_replay.subscriber.target_tables import TargetTable

if TYPE_CHECKING:
    from psycopg.abc import Buffer

FETCHED_ROWS: Final = 10_000
"""Rows of a query with many that are fetched at a time."""

_MAY_CREATE: Final = (
    "On the subscriber, grant the role CREATE and TEMPORARY on the database: what is made there is gone"
    " when the transaction ends."
)

_STAND: Final = """
    create schema {schema};
    grant usage, create on schema {schema} to {owner};
    create temporary table {answer} (row_count bigint, result text) on commit drop;
    grant insert on {answer} to {owner};
    set local role {owner};
    create function {schema}.read() returns setof text language plpgsql set search_path = '' as $$ begin
        return query execute format(
            'select to_json(cdc_replay_row)::text from (%s) as cdc_replay_row',
            current_setting('cdc_replay.statement')
        );
    end $$;
    create function {schema}.run() returns boolean language plpgsql set search_path = '' as $$
    declare
        found record;
        result text[];
        row_count bigint;
    begin
        case current_setting('cdc_replay.kind')
            when 'select' then
                insert into {answer} select count(*), string_agg(line, e'\\n') from {schema}.read() as line;
                return true;
            when 'returning' then
                for found in execute current_setting('cdc_replay.statement') loop
                    result := result || to_json(found)::text;
                end loop;
            else
                execute current_setting('cdc_replay.statement');
        end case;
        get diagnostics row_count = row_count;
        insert into {answer} values (row_count, array_to_string(result, e'\\n'));
        return true;
    end $$;
    create materialized view {schema}.call as select {schema}.run() with no data;
    reset role
"""

_CALL: Final = """
    delete from {answer};
    select pg_catalog.set_config('cdc_replay.statement', {statement}, true),
        pg_catalog.set_config('cdc_replay.kind', {kind}, true);
    set local role {owner};
    {call};
    reset role;
    select row_count, result from {answer} limit 1
"""


class TargetSession(Protocol):
    """Runs statements on a target with the rights that are needed there."""

    @property
    def is_of_owner(self) -> bool:
        """Whether these are its owner's, who can neither read our tables nor make temporary ones."""

    def execute(self, statement: sql.Composed) -> int:
        """Run a statement without result; the number of rows that it changed."""

    def query(self, statement: sql.Composed, *, changes: bool = False) -> list[tuple[Any, ...]]:
        """The rows of a query, or of a statement with a query that also `changes` rows."""

    def stream(self, query: sql.Composed, columns: LiteralString) -> Iterator[tuple[Any, ...]]:
        """The rows of a query that may have many, whose columns are of these types."""

    def copy(self, query: sql.Composed) -> AbstractContextManager[Iterable[Buffer]]:
        """The rows of a query with few and short ones as COPY writes them."""

    def share(self, table: sql.Identifier) -> None:
        """Let statements read and change a temporary table or view of ours."""


@dataclass(frozen=True, slots=True)
class AsOurselves:
    """With our own rights."""

    connection: Connection

    @property
    def is_of_owner(self) -> bool:
        """As `TargetSession`."""
        return False

    def execute(self, statement: sql.Composed) -> int:
        """As `TargetSession`."""
        return self.connection.execute(statement).rowcount

    def query(self, statement: sql.Composed, *, changes: bool = False) -> list[tuple[Any, ...]]:
        """As `TargetSession`."""
        del changes
        return self.connection.execute(statement).fetchall()

    def stream(self, query: sql.Composed, columns: LiteralString) -> Iterator[tuple[Any, ...]]:
        """As `TargetSession`."""
        del columns
        yield from _fetched(self.connection, query)

    @contextlib.contextmanager
    def copy(self, query: sql.Composed) -> Iterator[Iterable[Buffer]]:
        """As `TargetSession`."""
        statement = sql.SQL("copy ({}) to stdout").format(query)
        with self.connection.cursor() as cursor, cursor.copy(statement) as out:
            yield out

    def share(self, table: sql.Identifier) -> None:
        """As `TargetSession`; they are ours."""


@dataclass(slots=True)
class AsOwner:
    """With the rights of an owner, in the transaction in which it was made."""

    connection: Connection
    owner: str
    is_restricted: bool
    has_run: bool = False
    """Code of the owner may have run."""
    _schema: str = field(default_factory=lambda: f"cdc_replay_{uuid.uuid4().hex}")

    @property
    def is_of_owner(self) -> bool:
        """As `TargetSession`."""
        return True

    def create(self) -> None:
        """Make what it takes."""
        statement = sql.SQL(_STAND).format(
            schema=sql.Identifier(self._schema), owner=sql.Identifier(self.owner), answer=self._answer
        )
        with translated_errors(f'cannot run statements as role "{self.owner}"', grant=_MAY_CREATE):
            self.connection.execute(statement)

    def drop(self) -> None:
        """Remove it, before the transaction is committed."""
        self.connection.execute(sql.SQL("drop schema {} cascade").format(sql.Identifier(self._schema)))

    def execute(self, statement: sql.Composed) -> int:
        """As `TargetSession`."""
        row_count, _ = self._call(statement, "execute")
        return row_count

    def query(self, statement: sql.Composed, *, changes: bool = False) -> list[tuple[Any, ...]]:
        """As `TargetSession`; values are what JSON has of them."""
        _, result = self._call(statement, "returning" if changes else "select")
        # Columns may have equal names, so that no mapping holds them.
        return [json.loads(line, object_pairs_hook=_values) for line in result.split("\n")] if result else []

    def stream(self, query: sql.Composed, columns: LiteralString) -> Iterator[tuple[Any, ...]]:
        """As `TargetSession`."""
        rows = sql.Identifier("pg_temp", f"rows_{self._schema}")
        create = "create temporary table {} ({}) on commit drop"
        self.connection.execute(sql.SQL(create).format(rows, sql.SQL(columns)))
        self.share(rows)
        self.execute(sql.SQL("insert into {} {}").format(rows, query))
        yield from _fetched(self.connection, sql.SQL("table {}").format(rows))
        self.connection.execute(sql.SQL("drop table {}").format(rows))

    @contextlib.contextmanager
    def copy(self, query: sql.Composed) -> Iterator[Iterable[Buffer]]:
        """As `TargetSession`; of values that JSON has as COPY has them."""
        yield ("\t".join(map(str, row)).encode() + b"\n" for row in self.query(query))

    def share(self, table: sql.Identifier) -> None:
        """As `TargetSession`."""
        self.connection.execute(
            sql.SQL("grant select, insert, update, delete on {} to {}").format(
                table, sql.Identifier(self.owner)
            )
        )

    @property
    def _answer(self) -> sql.Identifier:
        return sql.Identifier("pg_temp", f"answer_{self._schema}")

    def _call(self, statement: sql.Composed, kind: str) -> tuple[int, str | None]:
        self.has_run = True
        how = "refresh materialized view {}.call" if self.is_restricted else "select {}.run()"
        cursor = self.connection.execute(
            sql.SQL(_CALL).format(
                answer=self._answer,
                statement=statement.as_string(self.connection),
                kind=kind,
                owner=sql.Identifier(self.owner),
                call=sql.SQL(how).format(sql.Identifier(self._schema)),
            )
        )
        while cursor.nextset():
            pass
        row_count, result = cursor.fetchone() or (0, None)
        return int(row_count), result


def _fetched(connection: Connection, query: sql.Composed) -> Iterator[tuple[Any, ...]]:
    with connection.cursor("rows") as cursor:
        cursor.itersize = FETCHED_ROWS
        yield from cursor.execute(query)


def _values(pairs: list[tuple[str, Any]]) -> tuple[Any, ...]:
    return tuple(value for _, value in pairs)


@dataclass(slots=True)
class TargetSessions:
    """The sessions for some targets, within one transaction; see `act_on`."""

    connection: Connection
    targets: Mapping[int, TargetTable]
    only_reads: bool
    _acting: dict[int, ActingRole] = field(default_factory=dict)
    _owners: dict[str, AsOwner] = field(default_factory=dict)

    def session_for(self, target: TargetTable) -> TargetSession:
        """The session for a target.

        Raises:
            TargetMismatch: if the target was renamed or dropped.
            MissingPrivilege: if our role may not act as its owner.
        """
        self._confirm_again()
        acting = self._acting[target.oid]
        if acting.rights is Rights.REFUSED:
            raise _refused(target)
        if not acting.rights.is_owners:
            return AsOurselves(self.connection)
        if acting.owner not in self._owners:
            is_restricted = acting.rights is Rights.RESTRICTED
            session = AsOwner(self.connection, acting.owner, is_restricted)
            session.create()
            self._owners[acting.owner] = session
        return self._owners[acting.owner]

    def group_by_session(
        self, targets: Iterable[TargetTable]
    ) -> Iterator[tuple[TargetSession, Sequence[TargetTable]]]:
        """Sessions for several targets, each with those that it is for."""
        self._confirm_again()
        of_owner: dict[str | None, list[TargetTable]] = {}
        for target in targets:
            acting = self._acting[target.oid]
            of_owner.setdefault(acting.owner if acting.rights.is_owners else None, []).append(target)
        for together in of_owner.values():
            yield self.session_for(together[0]), together

    def confirm(self) -> None:
        """Find out with whose rights to act, and keep others from changing that.

        Raises:
            TargetMismatch: if a target was renamed or dropped.
        """
        self._acting = {oid: target.acting for oid, target in self.targets.items()}
        if self.only_reads:
            # A lock would be in the way for as long as much is read.
            self._acting = {oid: acting.without_lock() for oid, acting in self._acting.items()}
        plain = sorted(oid for oid, acting in self._acting.items() if acting.rights is Rights.PLAIN)
        if plain:
            held = lock_tables(self.connection, {oid: target_reference(self.targets[oid]) for oid in plain})
            check_names(self.connection, {self.targets[oid].name: oid for oid in plain})
            for oid, acting in read_acting_roles(self.connection, plain, run_as_owner=False).items():
                self._acting[oid] = acting if oid in held else acting.without_lock()
        if any(each.has_run for each in self._owners.values()):
            check_names(self.connection, {each.name: oid for oid, each in self.targets.items()})
            for each in self._owners.values():
                each.has_run = False

    def _confirm_again(self) -> None:
        if any(each.has_run for each in self._owners.values()):
            # Locks keep others from changing a table, but not the code that has run in this very session.
            self.confirm()

    def close(self) -> None:
        """Remove what was made."""
        for each in self._owners.values():
            each.drop()


@contextlib.contextmanager
def act_on(
    connection: Connection, targets: Iterable[TargetTable], *, only_reads: bool = False
) -> Iterator[TargetSessions]:
    """Statements on the targets, in the caller's transaction, with the rights that they need.

    With `only_reads` no table is locked.

    Raises:
        TargetMismatch: if a target was renamed or dropped meanwhile.
    """
    sessions = TargetSessions(connection, {target.oid: target for target in targets}, only_reads)
    sessions.confirm()
    yield sessions
    sessions.close()


def _refused(target: TargetTable) -> MissingPrivilege:
    owner, name = target.acting.owner, target.name
    return MissingPrivilege(
        f'table "{name}" of the subscriber is owned by "{owner}", and the role of the subscription cannot'
        f' SET ROLE to "{owner}"',
        hint=CANNOT_BECOME.format(owner=owner),
        rule="R8.21",
    )


def has_rows(connection: Connection, target: TargetTable) -> bool:
    """Whether the target holds any row, in a transaction of its own.

    The session holds no advisory lock: code of the target's owner could release it.
    """
    query = sql.SQL("select exists (select from {})").format(target_reference(target))
    with connection.transaction(), act_on(connection, [target], only_reads=True) as sessions:
        ((found,),) = sessions.session_for(target).query(query)
    return bool(found)


def target_reference(target: TargetTable) -> sql.Composed:
    """The target in a statement; with its partitions, but without plain inheritance children (R8.15)."""
    only = sql.SQL("" if target.is_partitioned else "only ")
    return sql.SQL("{}{}").format(only, sql.Identifier(target.name.schema, target.name.name))
