"""The transactions of a server that are not over: what keeps a slot's restart_lsn back (R1.31)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cdc_replay.postgres.connection import Connection, translated_errors

# pg_locks is visible to everybody, sessions of other roles in pg_stat_activity only in part.
OLDEST: Final = """
    select xid::text, pid, gid, database, role, extract(epoch from clock_timestamp() - began)::float8
    from (
        select l.transactionid as xid, l.pid, null as gid, a.datname::text as database,
               a.usename::text as role, a.xact_start as began
        from pg_locks l left join pg_stat_activity a on a.pid = l.pid
        where l.locktype = 'transactionid' and l.mode = 'ExclusiveLock' and l.granted and l.pid is not null
        union all
        select transaction, null, gid, database::text, owner::text, prepared
        from pg_prepared_xacts
    ) open
    order by age(xid) desc
    limit 1
"""

LOG_SINCE: Final = 160000
MAY_LOG: Final = "select has_function_privilege('pg_catalog.pg_log_standby_snapshot()', 'execute')"


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction that has written and is not over; `gid` is set if it is prepared, else `pid`.

    What the server hides from the role is None.
    """

    xid: str
    pid: int | None
    gid: str | None
    database: str | None
    role: str | None
    seconds: float | None

    def __str__(self) -> str:
        """Which one it is, where, whose, and for how long it is open."""
        who = (
            f'prepared transaction "{self.gid}"' if self.pid is None else f"transaction of process {self.pid}"
        )
        where = "" if self.database is None else f', database "{self.database}"'
        whose = "" if self.role is None else f', role "{self.role}"'
        age = "" if self.seconds is None else f", open for {self.seconds:.0f} s"
        return f"{who} (xid {self.xid}{where}{whose}{age})"


def oldest_transaction(connection: Connection) -> OpenTransaction | None:
    """The oldest transaction of the cluster that has an xid and is not over, in any database."""
    with translated_errors("cannot look for open transactions"):
        row = connection.execute(OLDEST).fetchone()
    return None if row is None else OpenTransaction(*row)


def log_running_transactions(connection: Connection) -> bool:
    """Let the server log which transactions run, if this role may; False if not (and before 16)."""
    if connection.info.server_version < LOG_SINCE:
        return False
    ((may,),) = connection.execute(MAY_LOG).fetchall()
    if may:
        connection.execute("select pg_log_standby_snapshot()")
    return bool(may)
