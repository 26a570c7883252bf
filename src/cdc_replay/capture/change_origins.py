"""Which changes a subscription with `origin = none` must not see, where the wire does not say it (R8.20).

pgoutput names the origin of a transaction, as its commit record has it. The records of single changes have
origins too: in a local transaction those that carry one are left out by `origin = none`, the others are sent
(R8.19). An unfiltered stream shows no difference between them. So where a subscription asks for it, the range
is peeked with `origin = none` first, and what is missing there carries an origin:

| column `origin` of a row | means                                                                      |
|--------------------------|----------------------------------------------------------------------------|
| NULL                     | `origin = none` sends it                                                   |
| a name                   | its transaction has that origin                                            |
| empty                    | it has an origin, or COMMIT PREPARED has, whose name is not on the wire    |

The first peek goes ahead of the pulls: it is bounded in messages as they are, and ends after a whole
transaction (R1.24). Where it ended, the pulls behind it end as well, until there is another one. So no pull
reads a change that it has not covered: bounded by one position, two peeks hold the same transactions (R1.23).
A backlog is thus decoded twice, not once more for each pull.

A change is known by the position of its WAL record, which belongs to one transaction. The rows of one
multi-insert share it, and the origin with it. An M is known by the position of its *end* (R1.22), where the
next record may start, so M stays out of it; nothing routes it.

PostgreSQL 15 has no such option. There the origin of whole transactions is all that is known.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc_replay.capture.message_batch import Ints, MessageBatch, places_in
from cdc_replay.model.lsn import ZERO, Lsn
from cdc_replay.pgoutput.messages import MessageType
from cdc_replay.postgres.connection import Connection
from cdc_replay.postgres.peek import PeekOptions, peek

UNNAMED: Final = ""
"""The origin of a change that has one whose name is not on the wire."""

ORIGIN_OPTION_SINCE: Final = 160000

# Not the number of its rows: an origin that was dropped since has left changes behind, and empty pages stay
# until a VACUUM. A catalog that never had a row has no page.
HAS_ORIGINS: Final = "select pg_relation_size('pg_catalog.pg_replication_origin') > 0"

_CHANGES: Final = np.array([ord(letter) for letter in "IUDT"], dtype=np.uint8)
_COMMIT_PREPARED: Final = ord(MessageType.COMMIT_PREPARED.value)
_ENDS: Final = np.array([ord(letter) for letter in "CPKr"], dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class LocalChanges:
    """What `origin = none` sends of the transactions up to `upto`.

    `changes` are the positions of the records of its changes, `commits` the ends of its COMMIT PREPAREDs,
    both sorted.
    """

    changes: Ints
    commits: Ints
    upto: Lsn

    def marked(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Rows of the log, with the origin of those that have one and do not tell it."""
        positions = rows["lsn"].to_numpy()
        unknown = pc.and_(pc.is_null(rows["origin"]), pc.not_equal(rows["kind"], MessageType.MESSAGE.value))
        foreign = unknown.to_numpy(zero_copy_only=False) & ~places_in(self.changes, positions)[1]
        if not foreign.any():
            return rows
        origin = pc.if_else(pa.array(foreign), UNNAMED, rows["origin"])
        return rows.set_column(rows.schema.get_field_index("origin"), rows.schema.field("origin"), origin)

    def has_commit(self, end_lsn: Lsn) -> bool:
        """Whether the COMMIT PREPARED that ends there is sent."""
        return bool(places_in(self.commits, np.array([end_lsn.value]))[1].all())


def can_filter_origins(connection: Connection) -> bool:
    """Whether the server can tell changes with an origin apart, and may have any."""
    if connection.info.server_version < ORIGIN_OPTION_SINCE:
        return False
    ((has_origins,),) = connection.execute(HAS_ORIGINS).fetchall()
    return bool(has_origins)


def read_local_changes(
    connection: Connection, options: PeekOptions, *, upto_lsn: Lsn, upto_nchanges: int | None
) -> LocalChanges:
    """What `origin = none` sends of the range; `options` are those of the peek that it is read for.

    It ends at `upto_lsn`, or after the transaction with which there were `upto_nchanges` messages.

    Raises:
        SlotMissing, SlotActive, SlotLost, PublicationMissing, MissingPrivilege: as for `peek`.
    """
    only_local = PeekOptions(options.slot, options.publications, messages=False, origin_none=True)
    changes: list[Ints] = []
    commits: list[Ints] = []
    messages, last = 0, ZERO
    sent = peek(connection, only_local, upto_lsn=upto_lsn, upto_nchanges=upto_nchanges)
    with contextlib.closing(sent) as batches:
        for raw in batches:
            kinds = MessageBatch.of(raw, in_stream=False).kinds
            messages += len(kinds)
            changes.append(np.unique(raw.lsn[np.isin(kinds, _CHANGES)]))
            commits.append(raw.lsn[kinds == _COMMIT_PREPARED])
            if (ends := raw.lsn[np.isin(kinds, _ENDS)]).size:
                last = Lsn(int(ends[-1]))
    is_complete = upto_nchanges is None or messages < upto_nchanges
    return LocalChanges(_joined(changes), _joined(commits), upto_lsn if is_complete else last)


def _joined(parts: list[Ints]) -> Ints:
    return np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *parts]))
