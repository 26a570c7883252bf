"""Origins of single changes, which pgoutput does not send (R8.20).

pgoutput sends the origin in a transaction's commit record. The records of single changes have origins too:
in a local transaction `origin = none` skips those with an origin and sends the others (R8.19). An unfiltered
stream does not distinguish them. So if a subscription has `origin = none`, the range is first peeked with
that option; changes that are missing there have an origin:

| column `origin` of a row | meaning                                                                      |
|--------------------------|------------------------------------------------------------------------------|
| NULL                     | `origin = none` sends the change                                             |
| a name                   | its transaction has that origin                                              |
| empty                    | the change, or its COMMIT PREPARED, has an origin whose name was not sent    |

One such peek serves several pulls. It has the message limit of a pull and ends after a complete transaction
(R1.24); no pull reads beyond its end, and two peeks up to the same position have the same transactions
(R1.23). So a backlog is decoded twice, not twice per pull.

A change is identified by the LSN of its WAL record; the rows of one multi-insert share record and origin. A
logical message is identified by the *end* of its record (R1.22), where another record may start, so messages
are excluded; they are not routed anyway.

PostgreSQL 15 has no such option: there only the origin of whole transactions is known.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.capture.message_batch import Ints, MessageBatch, find_sorted
from cdc_replay.model.lsn import ZERO, Lsn
from cdc_replay.pgoutput.messages import MessageType
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.peek import PeekOptions, peek

UNNAMED: Final = ""
"""The origin of a change whose origin has an unknown name."""

ORIGIN_OPTION_SINCE: Final = 160000

# The size, not the row count: WAL may have changes of a dropped origin. Empty pages stay until a VACUUM; a
# catalog that never had a row has no page.
HAS_ORIGINS: Final = "select pg_relation_size('pg_catalog.pg_replication_origin') > 0"

_CHANGES: Final = np.array([ord(letter) for letter in "IUDT"], dtype=np.uint8)
_COMMIT_PREPARED: Final = ord(MessageType.COMMIT_PREPARED.value)
_ENDS: Final = np.array([ord(letter) for letter in "CPKr"], dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class LocalChanges:
    """What `origin = none` sends up to `upto`: LSNs of changes, and end LSNs of COMMIT PREPARED; sorted."""

    changes: Ints
    commits: Ints
    upto: Lsn

    def mark_origins(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Set the origin of rows that `origin = none` does not send to `UNNAMED`, unless it is known."""
        positions = rows["lsn"].to_numpy()
        unknown = pc.and_(pc.is_null(rows["origin"]), pc.not_equal(rows["kind"], MessageType.MESSAGE.value))
        has_hidden_origin = unknown.to_numpy(zero_copy_only=False) & ~find_sorted(self.changes, positions)[1]
        if not has_hidden_origin.any():
            return rows
        origin = pc.if_else(pa.array(has_hidden_origin), UNNAMED, rows["origin"])
        return rows.set_column(rows.schema.get_field_index("origin"), rows.schema.field("origin"), origin)

    def has_commit(self, end_lsn: Lsn) -> bool:
        """Whether the COMMIT PREPARED that ends at `end_lsn` is sent."""
        return bool(find_sorted(self.commits, np.array([end_lsn.value]))[1].all())


def can_filter_origins(connection: Connection) -> bool:
    """Whether the server has the option `origin`, and its WAL may have changes with an origin."""
    if connection.info.server_version < ORIGIN_OPTION_SINCE:
        return False
    ((has_origins,),) = connection.execute(HAS_ORIGINS).fetchall()
    return bool(has_origins)


def read_local_changes(
    connection: Connection, options: PeekOptions, *, upto_lsn: Lsn, upto_nchanges: int | None
) -> LocalChanges:
    """Peek with `origin = none`; `options` are those of the pull's own peek.

    The range ends at `upto_lsn`, or after the transaction that reaches `upto_nchanges` messages.

    Raises:
        SlotMissing, SlotActive, SlotLost, PublicationMissing, MissingPrivilege: as for `peek`.
    """
    local_options = PeekOptions(options.slot, options.publications, messages=False, origin_none=True)
    changes: list[Ints] = []
    commits: list[Ints] = []
    messages, last_end = 0, ZERO
    peeked = peek(connection, local_options, upto_lsn=upto_lsn, upto_nchanges=upto_nchanges)
    with contextlib.closing(peeked) as batches:
        for raw in batches:
            kinds = MessageBatch.from_raw(raw, in_stream=False).kinds
            messages += len(kinds)
            changes.append(np.unique(raw.lsn[np.isin(kinds, _CHANGES)]))
            commits.append(raw.lsn[kinds == _COMMIT_PREPARED])
            if (end_positions := raw.lsn[np.isin(kinds, _ENDS)]).size:
                last_end = Lsn(int(end_positions[-1]))
    is_complete = upto_nchanges is None or messages < upto_nchanges
    return LocalChanges(
        _sorted_unique(changes), _sorted_unique(commits), upto_lsn if is_complete else last_end
    )


def _sorted_unique(parts: list[Ints]) -> Ints:
    return np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *parts]))
