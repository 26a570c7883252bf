"""Transactions of every kind on a real publisher, and their facts as seen by SQL.

Nothing here reads the change stream: the facts come from the sessions that made the changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from cdc_replay.postgres.connection import Connection
from fixtures.postgres import Database

WIDEST: Final = 1600
"""Columns of a table at most."""

BIG: Final = 250
"""Rows of a piece of a transaction that exceeds the server's memory for decoding (64 kB)."""

TABLES: Final = f"""
    create type mood as enum ('sad', 'happy');
    create domain score as int check (value >= 0);
    create table things (
        id int primary key, ok bool, ratio float8, amount numeric(12, 3), label text, day date,
        seen timestamptz, span interval, raw bytea, tags text[], doc jsonb, feeling mood, points score,
        acl aclitem, note varchar(20), document text);
    alter table things alter document set storage external;
    create table logged (a int, b text, c text);
    alter table logged replica identity full;
    create table keyed (a int not null, b text, c int not null);
    create unique index keyed_index on keyed (c, a);
    alter table keyed replica identity using index keyed_index;
    create table append_only (a int);
    alter table append_only replica identity nothing;
    create table bare ();
    create table emptied (a serial primary key);
    create table emptied_too (a int references emptied);
    create table many (id int primary key, filler text);
    create table wide ({", ".join(f"c{number} int" for number in range(WIDEST))});
    create publication everything for all tables
"""

VALUES: Final = """
    insert into things values
        (1, true, 0.1, 149.9, 'ünï', '2013-01-01', '2013-01-01 05:15:00.123456+00', '1 day 02:03', '\\x00ff',
         array['a', null, 'b c'], '{"k": [1, null]}', 'happy', 7, 'postgres=r/postgres', 'short',
         repeat('x', 4000)),
        (2, null, 'NaN', null, '', '-infinity', 'infinity', null, '', '{}', '[]', null, null, null, null, ''),
        (3, false, '-Infinity', 0, e'tab\\tline\\nslash\\\\', '0044-03-15 BC', null, '-1 year', null, null,
         'null', 'sad', 0, 'postgres=w*/postgres', '', repeat('y', 4000)),
        (4, null, 1e-310, 'NaN', '😀', null, null, null, null, null, null, null, null, null, null, null)
"""

SUBTRANSACTION: Final = "select xmin::text::bigint from many where id = %s"


@dataclass(frozen=True)
class Committed:
    """A visible transaction; `commit_time` in microseconds since 1970, from the server."""

    name: str
    xid: int
    commit_time: int
    origin: str | None = None


@dataclass
class Facts:
    """What the sessions know; transactions in the order of their commits."""

    committed: list[Committed] = field(default_factory=list)
    rolled_back: set[int] = field(default_factory=set)
    rolled_back_parts: dict[int, int] = field(default_factory=dict)
    """Transaction of each rolled back subtransaction."""
    prepared: dict[str, int] = field(default_factory=dict)
    """Transaction of each gid."""

    def xid(self, name: str) -> int:
        """The transaction of that name."""
        [match] = [transaction.xid for transaction in self.committed if transaction.name == name]
        return match


class Traffic:
    """Runs the transactions; `facts` is complete when `run` returns."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.facts = Facts()
        self._id = 0

    def run(self) -> None:
        self.rows()
        self.truncates()
        self.messages()
        self.replicated()
        self.interleaved()
        self.two_phase()

    def rows(self) -> None:
        """Each kind of old tuple and of value (R1.4 to R1.6)."""
        self.transaction("values", VALUES)
        self.transaction("label", "update things set label = 'seen' where id = 1")
        self.transaction("key", "update things set id = 5 where id = 4")
        self.transaction("document", "update things set document = '' where id = 3")
        self.transaction("delete", "insert into things (id) values (9)", "delete from things where id = 9")
        self.transaction(
            "full", "insert into logged values (1, null, repeat('z', 3000)), (2, 'x', ''), (3, null, null)",
            "alter table logged alter c set storage external",
            "update logged set b = b where a = 1", "delete from logged where a = 2",
        )  # fmt: skip
        self.transaction(
            "index", "insert into keyed values (1, 'x', 10), (2, null, 20), (3, 'z', 30)",
            "update keyed set b = 'y' where a = 1", "update keyed set c = 21 where a = 2",
            "delete from keyed where a = 3",
        )  # fmt: skip
        self.transaction("nothing", "insert into append_only values (1), (null)")
        self.transaction("bare", "insert into bare default values", "insert into bare default values")
        numbers = ", ".join("null" if number % 7 == 0 else str(number) for number in range(WIDEST))
        self.transaction("wide", f"insert into wide values ({numbers})")

    def truncates(self) -> None:
        self.transaction("fill", "insert into emptied values (1), (2)", "insert into emptied_too values (1)")
        self.transaction("cascade", "truncate emptied restart identity cascade")
        self.transaction("restart", "truncate emptied_too restart identity")
        self.transaction("both", "truncate many, logged")
        self.transaction("refill", "insert into logged values (4, 'd', null)")

    def messages(self) -> None:
        emit = "select pg_logical_emit_message(%s, '%s', '%s'::bytea)"
        self.transaction(
            "message", emit % ("true", "inside ü", "\\x00ff"), "insert into append_only values (2)"
        )
        self.transaction("message alone", emit % ("true", "", ""))
        self.database.run(f"begin; {emit % ('false', 'outside', 'lost')}; rollback")

    def replicated(self) -> None:
        """A transaction that another node has made (R1.12)."""
        with self.database.connect() as session:
            session.execute("select pg_replication_origin_create(%s)", (self.origin,))
            session.execute("select pg_replication_origin_session_setup(%s)", (self.origin,))
            with self.committing(session, "origin", self.origin):
                session.execute(
                    "select pg_replication_origin_xact_setup('0/ABCD', '2001-02-03 04:05:06.000007+00')"
                )
                session.execute("insert into append_only values (3)")

    @property
    def origin(self) -> str:
        """Origins are names of the whole cluster."""
        return f"elsewhere_{self.database.name}"

    def interleaved(self) -> None:
        """Large transactions side by side, with savepoints rolled back at two depths; one is rolled back."""
        with self.database.connect() as first, self.database.connect() as second:
            with self.committing(second, "second"):
                self.fill(second)
                with self.committing(first, "first"):
                    self.fill(first)
                    self.fill(second)
                    self.fill_and_roll_back(first, "update many set filler = filler where id = %s")
                    self.fill(first)
                self.fill_and_roll_back(second, "delete from many where id = %s")
                self.fill(second)
                second.execute("alter table many add extra int")
                second.execute("insert into many values (0, 'altered', 1)")
            first.execute("begin")
            self.facts.rolled_back.add(xid_of(first))
            self.fill(first)
            self.fill(first)
            first.execute("rollback")

    def fill(self, session: Connection) -> int:
        """Insert `BIG` rows; returns the last id."""
        session.execute(
            "insert into many (id, filler) select id, repeat('f', 200) from generate_series(%s::int, %s) id",
            (self._id + 1, self._id + BIG),
        )
        self._id += BIG
        return self._id

    def fill_and_roll_back(self, session: Connection, statement: str) -> None:
        """Two savepoints in each other, of which the outer one is rolled back."""
        top = xid_of(session)
        before = self._id
        session.execute("savepoint outside")
        outer = self.fill(session)
        session.execute("savepoint inside")
        inner = self.fill(session)
        for last in (outer, inner):
            [(subxid,)] = session.execute(SUBTRANSACTION, (last,)).fetchall()
            self.facts.rolled_back_parts[subxid] = top
        session.execute(statement.encode(), (before,))
        session.execute("rollback to savepoint outside")

    def two_phase(self) -> None:
        """Prepared transactions: small and large, committed and rolled back."""
        for size, statements in (("small", 1), ("large", 4)):
            for outcome in ("commit", "rollback"):
                gid = f"{size} {outcome} ü"
                with self.database.connect() as session:
                    session.execute("begin")
                    xid = xid_of(session)
                    session.execute("insert into append_only values (4)")
                    for _ in range(statements - 1):
                        self.fill(session)
                    session.execute(f"prepare transaction '{gid}'".encode())
                    self.transaction(f"between {gid}", "insert into append_only values (5)")
                    session.execute(f"{outcome} prepared '{gid}'".encode())
                    self.facts.prepared[gid] = xid
                    if outcome == "commit":
                        self.facts.committed.append(Committed(gid, xid, commit_time(session, xid)))
                    else:
                        self.facts.rolled_back.add(xid)

    def transaction(self, name: str, *statements: str) -> None:
        with self.database.connect() as session, self.committing(session, name):
            for statement in statements:
                session.execute(statement.encode())

    @contextmanager
    def committing(self, session: Connection, name: str, origin: str | None = None) -> Iterator[None]:
        session.execute("begin")
        xid = xid_of(session)
        yield
        session.execute("commit")
        self.facts.committed.append(Committed(name, xid, commit_time(session, xid), origin))


def xid_of(session: Connection) -> int:
    [(xid,)] = session.execute("select pg_current_xact_id()::text::bigint").fetchall()
    return int(xid)


def commit_time(session: Connection, xid: int) -> int:
    [(microseconds,)] = session.execute(
        "select (extract(epoch from pg_xact_commit_timestamp(%s::text::xid)) * 1000000)::bigint", (xid,)
    ).fetchall()
    return int(microseconds)


def contents(database: Database, table: str, *, binary: bool) -> list[tuple[bytes | None, ...]]:
    """All rows as the server sends them: text, or binary but for `aclitem`, which has no binary form."""
    columns = ["*"]
    if binary and table == "things":
        names = database.rows(
            "select attname from pg_attribute where attrelid = 'things'::regclass and attnum > 0"
            " order by attnum"
        )
        columns = ["acl::text" if name == "acl" else name for (name,) in names]
    with database.connect() as session, session.cursor() as cursor:
        cursor.execute(f"select {', '.join(columns)} from {table}".encode(), binary=binary)
        result: Any = cursor.pgresult
        return [
            tuple(result.get_value(row, column) for column in range(result.nfields))
            for row in range(result.ntuples)
        ]


def peek(
    database: Database, slot: str, options: Sequence[str], *, function: str = "peek_binary"
) -> list[tuple[int, int, bytes]]:
    """What the slot function returns: lsn, xid, message."""
    with database.connect() as session:
        return session.execute(
            "select (lsn - '0/0')::bigint, xid::text::bigint, data"
            f" from pg_logical_slot_{function}_changes(%s, null, null, variadic %s)".encode(),
            (slot, list(options)),
        ).fetchall()
