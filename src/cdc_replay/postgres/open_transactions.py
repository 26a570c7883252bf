"""The open transactions of a server, which hold a slot's restart_lsn back (R1.31)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cdc_replay.postgres.connection import Connection, translated_errors

# pg_locks is visible to everybody, sessions of other roles in pg_stat_activity only in part. Names are bytes:
# those of databases in another encoding are not converted.
OLDEST: Final = """
    select xid::text, pid, textsend(gid), namesend(database), namesend(role),
           extract(epoch from clock_timestamp() - began)::float8
    from (
        select l.transactionid as xid, l.pid, null as gid, a.datname as database,
               a.usename as role, a.xact_start as began
        from pg_locks l left join pg_stat_activity a on a.pid = l.pid
        where l.locktype = 'transactionid' and l.mode = 'ExclusiveLock' and l.granted and l.pid is not null
        union all
        select transaction, null, gid, database, owner, prepared
        from pg_prepared_xacts
    ) open
    order by age(xid) desc
    limit 1
"""

LOG_SINCE: Final = 160000
MAY_LOG: Final = "select has_function_privilege('pg_catalog.pg_log_standby_snapshot()', 'execute')"


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """An open transaction that has an xid; `gid` is set if it is prepared, else `pid`.

    Values that the server hides from the role are None.
    """

    xid: str
    pid: int | None
    gid: str | None
    database: str | None
    role: str | None
    seconds: float | None

    def __str__(self) -> str:
        """The transaction, its database, role and age."""
        kind = (
            f'prepared transaction "{self.gid}"' if self.pid is None else f"transaction of process {self.pid}"
        )
        database = "" if self.database is None else f', database "{self.database}"'
        role = "" if self.role is None else f', role "{self.role}"'
        age = "" if self.seconds is None else f", open for {self.seconds:.0f} s"
        return f"{kind} (xid {self.xid}{database}{role}{age})"


def oldest_transaction(connection: Connection) -> OpenTransaction | None:
    """The oldest open transaction of the cluster that has an xid, in any database."""
    with translated_errors("cannot look for open transactions"):
        row = connection.execute(OLDEST).fetchone()
    if row is None:
        return None
    xid, pid, *names, seconds = row
    gid, database, role = (None if name is None else name.decode(errors="backslashreplace") for name in names)
    return OpenTransaction(xid, pid, gid, database, role, seconds)


def log_running_transactions(connection: Connection) -> bool:
    """Make the server log its running transactions; False if the role may not, or before version 16."""
    if connection.info.server_version < LOG_SINCE:
        return False
    ((may,),) = connection.execute(MAY_LOG).fetchall()
    if may:
        connection.execute("select pg_log_standby_snapshot()")
    return bool(may)
