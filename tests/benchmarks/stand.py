"""The stand of one workload: two servers of its own, and equal databases for each side that is measured.

| side   | who                                                                        |
|--------|----------------------------------------------------------------------------|
| native | subscriptions of the server itself                                         |
| cold   | this project, each command a fresh process                                 |
| warm   | this project, a process with a Spark session that has done work before     |
| alone  | this project, only `capture`                                               |

Each side of ours has a slot, a change log and databases of its own, so that all drain the same backlog.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import psycopg
import yaml
from psycopg import sql

from benchmarks.backlogs import Connection
from benchmarks.programs import PROGRAM, postmaster
from cdc_replay.changelog.log import ChangeLog
from embedded.postgres import Cluster, binaries

SETTINGS: Final = {
    # A checkpoint would be measured with whatever runs at that moment.
    "max_wal_size": "40GB",
    "checkpoint_timeout": "1h",
    "shared_buffers": "512MB",
    "autovacuum": "off",
    "max_wal_senders": "120",
    "max_replication_slots": "120",
    "max_connections": "300",
    "max_worker_processes": "120",
    "max_logical_replication_workers": "100",
}
# From 18 on; before, the number of slots bounds that of origins too.
_ORIGINS: Final = "max_active_replication_origins"
PUBLISHER: Final = "bench"
TEMPLATE: Final = "empty_tables"
PATIENCE_SECONDS: Final = 3600

_CONFIRMED: Final = """
    select count(*) filter (where confirmed_flush_lsn >= %s::pg_lsn) = %s from pg_replication_slots
    where slot_name = any(%s)
"""
_INACTIVE: Final = "select not bool_or(active) from pg_replication_slots where slot_name = any(%s)"
_SYNCHRONISED: Final = """
    select count(*) > 0 and bool_and(r.srsubstate = 'r')
    from pg_subscription_rel r join pg_subscription s on s.oid = r.srsubid
    where s.subdbid = (select oid from pg_database where datname = current_database())
"""
_DIGEST: Final = "select count(*), sum(hashtextextended(row({})::text, 0)::numeric)::text from {}"
_TABLES: Final = """
    select c.relname::text, array_agg(a.attname::text order by a.attname)
    from pg_class c join pg_attribute a on a.attrelid = c.oid
    where c.relnamespace = 'public'::regnamespace and c.relkind in ('r', 'p') and not c.relispartition
        and a.attnum > 0 and not a.attisdropped and a.attname <> all(%s)
    group by 1 order by 1
"""


@dataclass(frozen=True)
class Stand:
    """Two servers, and what each side subscribes to: a tuple of publications per subscription."""

    folder: Path
    publisher: Cluster
    subscriber: Cluster
    subscriptions: tuple[tuple[str, ...], ...]

    @property
    def servers(self) -> Mapping[str, Cluster]:
        """Both, by name."""
        return {"publisher": self.publisher, "subscriber": self.subscriber}

    @property
    def servers_pids(self) -> tuple[int, ...]:
        """Their postmasters."""
        return tuple(postmaster(server) for server in self.servers.values())

    @property
    def file(self) -> Path:
        """The configuration of all sides of ours."""
        return self.folder / "cdc_replay.yaml"

    def names(self, side: str) -> list[str]:
        """The subscriptions of a side; its databases have the same names."""
        return [f"{side}_{number}" for number in range(len(self.subscriptions))]

    def arguments(self, command: str, *names: str) -> list[str]:
        """Words of a command line of ours."""
        return [command, *names, "--config", str(self.file), "--json"]

    def command(self, command: str, *names: str) -> list[str]:
        """A command of ours as a process."""
        return [PROGRAM, *self.arguments(command, *names)]

    def line(self, command: str, *names: str) -> str:
        """The same as a line of `batch`."""
        return " ".join(self.arguments(command, *names))

    def publisher_connection(self) -> Connection:
        """A session of the publisher, each statement a transaction."""
        return psycopg.connect(self.publisher.dsn(PUBLISHER), autocommit=True)

    def subscriber_connection(self, database: str) -> Connection:
        """The same at a subscriber."""
        return psycopg.connect(self.subscriber.dsn(database), autocommit=True)

    def create_databases(self, publisher_script: str, subscriber_script: str, sides: Sequence[str]) -> None:
        """The publisher's database, and one per subscription of each side; the configuration of ours."""
        _create_database(self.publisher, PUBLISHER)
        _create_database(self.subscriber, TEMPLATE)
        with self.publisher_connection() as connection:
            connection.execute(publisher_script.encode())
        with self.subscriber_connection(TEMPLATE) as connection:
            connection.execute(subscriber_script.encode())
        for side in sides:
            for name in self.names(side):
                _create_database(self.subscriber, name, TEMPLATE)
        ours = [side for side in sides if side != "native"]
        self.file.write_text(yaml.safe_dump(self._configuration(ours)), encoding="utf-8")

    def _configuration(self, sides: Sequence[str]) -> dict[str, object]:
        publishers = {
            side: {
                "dsn": self.publisher.dsn(PUBLISHER),
                "slot": _slot(side),
                "change_log": self._change_log(side),
            }
            for side in sides
        }
        subscriptions = {
            name: {"publisher": side, "publications": list(publications), "dsn": self.subscriber.dsn(name)}
            for side in sides
            for name, publications in zip(self.names(side), self.subscriptions, strict=True)
        }
        return {"publishers": publishers, "subscriptions": subscriptions}

    def set_up(self, sides: Sequence[str], setup: Callable[[str], object]) -> None:
        """Set up the publisher for all sides of ours; `setup` runs a line of a batch.

        A database has one set of capture publications, which belong to one slot. The other sides read copies
        of that slot into logs that start where its log does.
        """
        first, *others = sides
        setup(self.line("setup", first))
        header = ChangeLog.open(self._change_log(first)).header
        with self.publisher_connection() as connection:
            for side in others:
                connection.execute(
                    "select pg_copy_logical_replication_slot(%s, %s)", (_slot(first), _slot(side))
                )
                ChangeLog.create(self._change_log(side), replace(header, slot=_slot(side)))

    def _change_log(self, side: str) -> str:
        return str(self.folder / f"log_{side}")

    # The native side.

    def subscribe_natively(self) -> float:
        """CREATE SUBSCRIPTION for all, and wait until their tables are there; the seconds that took."""
        conninfo = f"host=127.0.0.1 port={self.publisher.port} user=postgres dbname={PUBLISHER}"
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            connections = []
            for name, publications in zip(self.names("native"), self.subscriptions, strict=True):
                connections.append(stack.enter_context(self.subscriber_connection(name)))
                connections[-1].execute(
                    sql.SQL("create subscription {} connection {} publication {}").format(
                        sql.Identifier(name),
                        conninfo,
                        sql.SQL(", ").join(map(sql.Identifier, publications)),
                    )
                )
            for connection in connections:
                wait_for(partial(holds, connection, _SYNCHRONISED), "the native tables")
        return time.monotonic() - began

    def drain_natively(self, end: str) -> float:
        """Let all native subscriptions run until the last has confirmed `end`; seconds."""
        names = self.names("native")
        began = time.monotonic()
        with self.publisher_connection() as connection:
            self.switch_natives("enable")
            wait_for(
                lambda: holds(connection, _CONFIRMED, (end, len(names), names)), f"{names} to confirm {end}"
            )
        return time.monotonic() - began

    def pause_natives(self) -> None:
        """Stop all native subscriptions; their slots keep what follows."""
        self.switch_natives("disable")
        with self.publisher_connection() as connection:
            wait_for(lambda: holds(connection, _INACTIVE, (self.names("native"),)), "the natives to stop")

    def switch_natives(self, how: str) -> None:
        for name in self.names("native"):
            with self.subscriber_connection(name) as connection:
                connection.execute(f"alter subscription {name} {how}".encode())

    def write_out(self) -> None:
        """Write what a run has left in the subscriber's memory: the next would have to, in its time."""
        with self.subscriber_connection(TEMPLATE) as connection:
            connection.execute("checkpoint")

    # What the subscribers hold.

    def content(self, name: str, *, without: Sequence[str] = ()) -> dict[str, tuple[int, str | None]]:
        """Table → rows and the sum of their hashes; columns in the order of their names."""
        found = {}
        with self.subscriber_connection(name) as connection:
            for table, columns in connection.execute(_TABLES, (list(without),)).fetchall():
                query = sql.SQL(_DIGEST).format(
                    sql.SQL(", ").join(map(sql.Identifier, columns)), sql.Identifier(table)
                )
                [(rows, digest)] = connection.execute(query).fetchall()
                found[table] = (rows, digest)
        return found

    def differences(self, sides: Sequence[str], *, without: Sequence[str] = ()) -> list[str]:
        """The tables of ours that do not hold what the native ones do."""
        wrong = []
        for number, native in enumerate(self.names("native")):
            expected = self.content(native, without=without)
            for side in sides:
                name = self.names(side)[number]
                found = self.content(name, without=without)
                wrong += [f"{name}.{table}" for table in expected if found.get(table) != expected[table]]
        return wrong


@contextlib.contextmanager
def stand(subscriptions: tuple[tuple[str, ...], ...]) -> Iterator[Stand]:
    """Start the servers in a folder of their own; at the end they are stopped and the folder is removed."""
    settings = server_settings()
    folder = Path(tempfile.mkdtemp(prefix="cdc_replay_bench_"))
    folder.chmod(0o755)
    try:
        with (
            Cluster(folder, "publisher", settings=settings) as publisher,
            Cluster(folder, "subscriber", settings=settings) as subscriber,
        ):
            yield Stand(folder, publisher, subscriber, subscriptions)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def server_settings() -> dict[str, str]:
    """What both servers run with: none of their limits is in the way of many subscriptions."""
    described = subprocess.run(
        [binaries() / "postgres", "--describe-config"], check=True, capture_output=True, text=True
    ).stdout
    return SETTINGS | ({_ORIGINS: "120"} if _ORIGINS in described else {})


def holds(connection: Connection, query: str, values: Sequence[object] = ()) -> bool:
    """Whether a query's one value is true."""
    row = connection.execute(query.encode(), values).fetchone()
    return bool(row and row[0])


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Poll until the condition holds.

    Raises:
        TimeoutError: naming `what`.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {PATIENCE_SECONDS} s for {what}")
        time.sleep(0.02)


def _slot(side: str) -> str:
    return f"slot_{side}"


def _create_database(cluster: Cluster, name: str, template: str | None = None) -> None:
    statement = sql.SQL("create database {}").format(sql.Identifier(name))
    if template is not None:
        statement += sql.SQL(" template {}").format(sql.Identifier(template))
    with psycopg.connect(cluster.dsn(), autocommit=True) as connection:
        connection.execute(statement)
