"""Statements on a target that run with its owner's rights and cannot regain ours (R8.21).

Code that runs after a plain SET ROLE can reset the role, and settings, cursors WITH HOLD and deferred
triggers that a SECURITY DEFINER function leaves would later run with our rights. A native apply worker
switches to the owner in a *security-restricted operation*, which prevents all of that. SQL can enter one:
REFRESH MATERIALIZED VIEW runs the view's query as its owner in such an operation, and restores the settings
that it changed. So, within the caller's transaction:

    create schema s, for this transaction only; the owner may use it
    as the owner: create function s.run(), which executes the statement in a setting
    as the owner: create materialized view s.call as select s.run() with no data
    for each statement: as the owner, refresh materialized view s.call; its result is in a table of ours
    drop schema s

Whatever the owner's code does to these objects, a refresh runs nothing with our rights; only the reported row
count depends on it. An owner that may become our role anyway is not restricted, as natively: its function is
called after a plain SET ROLE.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, LiteralString, Protocol

import psycopg
from psycopg import sql

from cdc_replay.errors import MissingPrivilege, TargetMismatch
from cdc_replay.model.relation import QualifiedName
from cdc_replay.postgres.connection import Connection, cancel_statement, translated_errors
from cdc_replay.postgres.identifiers import commas
from cdc_replay.subscriber.owners import (
    CANNOT_BECOME,
    FORCED_ON_OWNER,
    UNFORCE,
    ActingRole,
    Rights,
    hold_schemas,
    hold_tables,
    lock_tables,
    read_acting_roles,
)
from cdc_replay.subscriber.target_checks import check_names, renamed_target
from cdc_replay.subscriber.target_statements import target_reference
from cdc_replay.subscriber.target_tables import TargetTable

if TYPE_CHECKING:
    from psycopg.abc import Buffer

FETCHED_ROWS: Final = 10_000
"""Rows of a large query that are fetched at a time."""

_MAY_CREATE: Final = (
    "On the subscriber, grant the role CREATE and TEMPORARY on the database: the objects that it creates are"
    " dropped in the same transaction."
)

_SET_UP: Final = """
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
        changed record;
        result text[];
        row_count bigint;
    begin
        case current_setting('cdc_replay.kind')
            when 'select' then
                insert into {answer} select count(*), string_agg(line, e'\\n') from {schema}.read() as line;
                return true;
            when 'returning' then
                for changed in execute current_setting('cdc_replay.statement') loop
                    result := result || to_json(changed)::text;
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
    """Runs statements on a target with the required rights."""

    @property
    def runs_as_owner(self) -> bool:
        """Whether statements run as the owner, who can neither read our tables nor create temporary ones."""

    def execute(self, statement: sql.Composed) -> int:
        """Run a statement without result; returns the number of changed rows."""

    def query(self, statement: sql.Composed, *, changes: bool = False) -> list[tuple[Any, ...]]:
        """The rows of a query, or of a statement with RETURNING that also `changes` rows."""

    def stream(self, query: sql.Composed, columns: LiteralString) -> Iterator[tuple[Any, ...]]:
        """The rows of a large query, whose columns have these types."""

    def copy(self, query: sql.Composed) -> AbstractContextManager[Iterable[Buffer]]:
        """The rows of a small query in COPY's text format."""

    def share(self, table: sql.Identifier) -> None:
        """Grant the statements access to a temporary table or view of ours."""

    def into_temporary(self, table: sql.Identifier, columns: Iterable[sql.Composable]) -> sql.Composed:
        """The start of a statement whose query fills a new temporary table, to the end of the transaction.

        `columns` define it for an owner, who cannot create it.
        """

    def cancel(self) -> None:
        """From another thread: cancel the running statement, if there is one."""


@dataclass(frozen=True, slots=True)
class AsOurselves:
    """Runs statements with our own rights."""

    connection: Connection

    @property
    def runs_as_owner(self) -> bool:
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
        """As `TargetSession`; a no-op."""

    def into_temporary(self, table: sql.Identifier, columns: Iterable[sql.Composable]) -> sql.Composed:
        """As `TargetSession`."""
        del columns
        return sql.SQL("create temporary table {} on commit drop as").format(table)

    def cancel(self) -> None:
        """As `TargetSession`."""
        cancel_statement(self.connection)


@dataclass(slots=True)
class AsOwner:
    """Runs statements with an owner's rights, within the transaction that created the session."""

    connection: Connection
    owner: str
    is_restricted: bool
    has_run: bool = False
    """Code of the owner may have run."""
    _schema: str = field(default_factory=lambda: f"cdc_replay_{uuid.uuid4().hex}")

    @property
    def runs_as_owner(self) -> bool:
        """As `TargetSession`."""
        return True

    def create(self) -> None:
        """Create the schema, function and view."""
        statement = sql.SQL(_SET_UP).format(
            schema=sql.Identifier(self._schema), owner=sql.Identifier(self.owner), answer=self._answer
        )
        with translated_errors(f'cannot run statements as role "{self.owner}"', grant=_MAY_CREATE):
            self.connection.execute(statement)

    def drop(self) -> None:
        """Drop them, before the transaction is committed."""
        self.connection.execute(sql.SQL("drop schema {} cascade").format(sql.Identifier(self._schema)))

    def execute(self, statement: sql.Composed) -> int:
        """As `TargetSession`."""
        row_count, _ = self._call(statement, "execute")
        return row_count

    def query(self, statement: sql.Composed, *, changes: bool = False) -> list[tuple[Any, ...]]:
        """As `TargetSession`; values have their JSON types."""
        _, result = self._call(statement, "returning" if changes else "select")
        # Not a dict: columns may have equal names.
        rows = [json.loads(line, object_pairs_hook=_values) for line in result.split("\n")] if result else []
        # JSON that the owner's code wrote may have half a character: then nothing could write the error.
        json.dumps(rows, ensure_ascii=False).encode()
        return rows

    def stream(self, query: sql.Composed, columns: LiteralString) -> Iterator[tuple[Any, ...]]:
        """As `TargetSession`."""
        rows = sql.Identifier("pg_temp", f"rows_{self._schema}")
        into = self.into_temporary(rows, [sql.SQL(columns)])
        self.execute(sql.SQL("{} {}").format(into, query))
        yield from _fetched(self.connection, sql.SQL("table {}").format(rows))
        self.connection.execute(sql.SQL("drop table {}").format(rows))

    @contextlib.contextmanager
    def copy(self, query: sql.Composed) -> Iterator[Iterable[Buffer]]:
        """As `TargetSession`, for values whose JSON and COPY text are equal."""
        yield ("\t".join(map(str, row)).encode() + b"\n" for row in self.query(query))

    def share(self, table: sql.Identifier) -> None:
        """As `TargetSession`."""
        self.connection.execute(
            sql.SQL("grant select, insert, update, delete on {} to {}").format(
                table, sql.Identifier(self.owner)
            )
        )

    def into_temporary(self, table: sql.Identifier, columns: Iterable[sql.Composable]) -> sql.Composed:
        """As `TargetSession`."""
        create = sql.SQL("create temporary table {} ({}) on commit drop")
        self.connection.execute(create.format(table, commas(columns)))
        self.share(table)
        return sql.SQL("insert into {}").format(table)

    def cancel(self) -> None:
        """As `TargetSession`."""
        cancel_statement(self.connection)

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
    """The sessions of some targets, within one transaction; see `act_on`."""

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
        if not acting.rights.runs_as_owner:
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
        """The sessions of several targets, each with its targets."""
        self._confirm_again()
        by_owner: dict[str | None, list[TargetTable]] = {}
        for target in targets:
            acting = self._acting[target.oid]
            by_owner.setdefault(acting.owner if acting.rights.runs_as_owner else None, []).append(target)
        for group in by_owner.values():
            yield self.session_for(group[0]), group

    def confirm(self) -> None:
        """Determine the rights for each target, and lock what they depend on.

        Raises:
            TargetMismatch: if a target was renamed or dropped.
        """
        is_first = not self._acting
        planned = {oid: target.acting for oid, target in self.targets.items()}
        if self.only_reads:
            # A long read would hold the lock for its whole duration.
            planned = {oid: acting.without_lock() for oid, acting in planned.items()}
        plain = sorted(oid for oid, acting in planned.items() if acting.rights is Rights.PLAIN)
        if plain:
            locked = lock_tables(self.connection, {oid: target_reference(self.targets[oid]) for oid in plain})
            check_names(self.connection, {self.targets[oid].name: oid for oid in plain})
            for oid, acting in read_acting_roles(self.connection, plain, run_as_owner=False).items():
                self._acting[oid] = acting if oid in locked else acting.without_lock()
        if is_first:
            self._acting = planned | self._acting
            self._hold()
        if self._owner_code_has_run():
            check_names(self.connection, {target.name: oid for oid, target in self.targets.items()})
            for session in self._owners.values():
                session.has_run = False

    def _hold(self) -> None:
        """Keep the names and owners of tables on which others than PLAIN rights act; adopt their rights.

        Who owns a schema may drop any table in it, and put one with code under its name.
        """
        by_name = {
            oid: acting
            for oid, acting in sorted(self._acting.items())
            if acting.rights not in {Rights.PLAIN, Rights.REFUSED} and not acting.run_as_owner
        }
        if not by_name:
            return
        if not self.only_reads:
            hold_schemas(self.connection, by_name)
        roles: dict[str | None, dict[int, QualifiedName]] = {}
        for oid, acting in by_name.items():
            role = acting.owner if acting.rights.runs_as_owner else None
            roles.setdefault(role, {})[oid] = self.targets[oid].name
        for role, tables in roles.items():
            self._hold_as(role, tables)
        self._adopt_rights(by_name)

    def _adopt_rights(self, oids: Collection[int]) -> None:
        for oid, now in read_acting_roles(self.connection, oids, run_as_owner=False).items():
            acting = self._acting[oid]
            if now.owner != acting.owner or now.rights.owner_is_untrusted > acting.rights.owner_is_untrusted:
                raise _given_away(self.targets[oid])
            self._acting[oid] = now.without_lock()

    def _hold_as(self, role: str | None, tables: Mapping[int, QualifiedName]) -> None:
        try:
            with self.connection.transaction():
                renamed = hold_tables(self.connection, tables, role)
        except psycopg.ProgrammingError:
            check_names(self.connection, dict(zip(tables.values(), tables, strict=True)))
            self._adopt_rights(tables)
            raise
        for oid in renamed:
            raise renamed_target(tables[oid])

    def _confirm_again(self) -> None:
        if self._owner_code_has_run():
            # Locks stop other sessions from changing a table, but not code that ran in this session.
            self.confirm()

    def _owner_code_has_run(self) -> bool:
        return any(session.has_run for session in self._owners.values())

    def forged_answer(self) -> TargetMismatch | None:
        """The error for an answer that cannot be read: only owners, who can write answers, give such ones."""
        if not self._owners:
            return None
        names = ", ".join(f'"{name}"' for name in sorted(self._owners))
        return TargetMismatch(
            f"code in tables of {names} on the subscriber has changed the answers of statements",
            hint="Find the trigger, default or function that writes into temporary tables, and remove it.",
            rule="R8.21",
        )

    def close(self) -> None:
        """Drop what the sessions created.

        Raises:
            TargetMismatch: if a policy may have hidden rows from an owner; by now the tables are locked.
        """
        as_owner = [oid for oid, acting in self._acting.items() if acting.rights.runs_as_owner]
        for oid, acting in read_acting_roles(self.connection, as_owner, run_as_owner=False).items():
            if acting.forces_row_security:
                raise _hides_rows(self.targets[oid], acting.owner)
        for session in self._owners.values():
            session.drop()


@contextlib.contextmanager
def act_on(
    connection: Connection, targets: Iterable[TargetTable], *, only_reads: bool = False
) -> Iterator[TargetSessions]:
    """Sessions for statements on the targets, with the required rights, in the caller's transaction.

    With `only_reads` tables are locked as by a query.

    Raises:
        TargetMismatch: if a target was renamed or dropped, its owner's code has put what is no answer into
            the place of one, or a policy may have hidden rows.
    """
    sessions = TargetSessions(connection, {target.oid: target for target in targets}, only_reads)
    sessions.confirm()
    try:
        yield sessions
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        # The answer may have been any JSON: a row without columns, an infinite number, half a character.
        if (forged := sessions.forged_answer()) is None:
            raise
        raise forged from error
    sessions.close()


def _hides_rows(target: TargetTable, owner: str) -> TargetMismatch:
    return _mismatch(target, f": {FORCED_ON_OWNER.format(owner=owner)}", UNFORCE)


def _given_away(target: TargetTable) -> TargetMismatch:
    return _mismatch(
        target,
        " was given to another role, or its owner lost rights",
        "Run the command again: this transaction was rolled back.",
    )


def _mismatch(target: TargetTable, problem: str, hint: str) -> TargetMismatch:
    name = target.name
    message = f'table "{name}" of the subscriber{problem}'
    return TargetMismatch(message, hint=hint, rule="R8.21", table=(name.schema, name.name))


def _refused(target: TargetTable) -> MissingPrivilege:
    owner, name = target.acting.owner, target.name
    return MissingPrivilege(
        f'table "{name}" of the subscriber is owned by "{owner}", and the role of the subscription cannot'
        f' SET ROLE to "{owner}"',
        hint=CANNOT_BECOME.format(owner=owner),
        rule="R8.21",
    )


def has_rows(connection: Connection, target: TargetTable) -> bool:
    """Whether the target has any row, checked in a transaction of its own.

    The session must not hold an advisory lock: code of the target's owner could release it.
    """
    query = sql.SQL("select exists (select from {})").format(target_reference(target))
    with connection.transaction(), act_on(connection, [target], only_reads=True) as sessions:
        ((exists,),) = sessions.session_for(target).query(query)
    return bool(exists)
