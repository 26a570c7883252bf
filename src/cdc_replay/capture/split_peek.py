"""Reads the range of a pull in two pieces: while the first is read, the server decodes the second.

The slot function returns nothing before it has decoded all (R1.32). Read in one piece, a range costs the time
of decoding it, and then that of reading it:

    slot  decode ──────────────▶ read ──────────────▶

    slot  decode ────▶ read ────▶
    copy  decode ────────▶       read ────────▶

The second piece is read from a temporary copy of the slot, which is advanced to where the first ends. The
server partitions the transactions by the start of their commit records: the first piece has those before that
position, the second the others. Nothing else depends on the copy: it ends with its session, and the slot
itself is moved by the pull.

| a range is read in one piece if | because                                                             |
|---------------------------------|---------------------------------------------------------------------|
| it is short                     | there is little to gain                                             |
| it begins far after restart_lsn | each piece decodes the WAL from there again (R1.31)                 |
| the slot has two_phase          | a copy would not: it sends prepared transactions at their COMMIT    |
| the slot waits for standbys     | a copy does not (R1.32), so the log would be ahead of them          |
| the server refused a copy       | such as for want of a free slot; it is not tried again in this run  |
| the limit ended a first piece   | the second one was of no use; it is not tried again in this run     |

If the copy fails before its first message, the range ends after the first piece. The next pull reads the
rest, and reports what is wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import psycopg

from cdc_replay.errors import CdcReplayError
from cdc_replay.failpoints import failpoint
from cdc_replay.model.lsn import ZERO, Lsn, Window
from cdc_replay.postgres.connection import Connection, cancel_statement, connect
from cdc_replay.postgres.peek import PeekOptions, RawMessages, peek, use_decoding_memory
from cdc_replay.postgres.slot import advance_slot, copy_slot

logger = logging.getLogger(__name__)

FIRST_SHARE: Final = 0.4
"""Of the range; the first piece is read once it is decoded, and by then the second should be decoded too."""

MOST_DECODED_TWICE: Final = 1.5
"""Of the range, as WAL before the second piece that the server decodes for it too, at a fifth of the cost.

With more, the second core would mostly repeat what the first one does.
"""

ALIGNMENT_BYTES: Final = 64 << 10
"""The second piece begins at a multiple of this, where a page of WAL begins, whatever the server's page size.

A peek up to a position in a page's header has the transaction whose commit record is the first of that page
(R1.23), and so does a peek from there on.
"""

_CANCEL_SECONDS: Final = 1.0
"""How long a cancelled statement may go on before it is cancelled again: the next one may have begun."""

_Begun: TypeAlias = tuple[tuple[RawMessages, ...], Generator[RawMessages]]
"""The first messages of a peek, and the others."""

_WAITS_FOR_STANDBYS: Final = "select coalesce(current_setting('synchronized_standby_slots', true), '') <> ''"


def may_split(connection: Connection) -> bool:
    """Whether a copy of a slot sends what the slot would: no standbys have to confirm it first."""
    return not connection.execute(_WAITS_FOR_STANDBYS).fetchall()[0][0]


@dataclass(slots=True)
class SplitPeek:
    """The messages of a slot that commit in `window`, in order; iterate over it once.

    `least_bytes`: a shorter range is not split. Each piece ends early once it has `limit` messages (R1.24);
    nothing follows then.

    Raises:
        CdcReplayError: as `peek`.
    """

    connection: Connection
    dsn: str
    options: PeekOptions
    window: Window
    limit: int | None
    least_bytes: int
    restart_lsn: Lsn
    may_split: bool = True
    """Whether a second piece can be read and is of use, as far as is known."""
    complete_upto: Lsn = field(default=ZERO, init=False)
    """Everything that commits before this position was read."""

    def batches(self) -> Generator[RawMessages]:
        """The messages; use it in `contextlib.closing`, as for `peek`."""
        split = self.split_lsn()
        if split is None:
            yield from self._first_piece(self.window.upto)
            return
        with self._decoding_ahead(split) as second:
            yield from self._first_piece(split)
            if self.complete_upto < split:
                self.may_split = False
            elif second is not None:
                failpoint("peek.between_pieces")
                yield from self._second_piece(second)

    def split_lsn(self) -> Lsn | None:
        """Where the second piece begins; None if there is only one."""
        after, length = self.window.after.value, self.window.upto.value - self.window.after.value
        split = (after + int(length * FIRST_SHARE)) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        decoded_twice = split - self.restart_lsn.value
        is_worth_it = (
            length >= self.least_bytes and split > after and decoded_twice <= length * MOST_DECODED_TWICE
        )
        return Lsn(split) if is_worth_it and self.may_split and not self.options.two_phase else None

    @contextlib.contextmanager
    def _decoding_ahead(self, split: Lsn) -> Iterator[Future[_Begun] | None]:
        """Let the server decode what commits after `split`, in a session that ends with the block.

        In a thread, since the server says nothing before it has decoded all, not even that it has begun.
        """
        try:
            ahead = connect(self.dsn, purpose="capture ahead")
        except (CdcReplayError, psycopg.Error) as error:
            self._refuse(error)
            yield None
            return
        with ahead, ThreadPoolExecutor(1, thread_name_prefix="capture ahead") as thread:
            decoded = thread.submit(self._decode_ahead, ahead, split)
            try:
                yield decoded
            finally:
                while not wait((decoded,), timeout=0).done:
                    cancel_statement(ahead)
                    wait((decoded,), timeout=_CANCEL_SECONDS)
                if decoded.exception() is None:
                    decoded.result()[1].close()

    def _decode_ahead(self, ahead: Connection, split: Lsn) -> _Begun:
        """The messages that commit after `split`, once the server has decoded them all."""
        use_decoding_memory(ahead)
        name = f"cdc_replay_ahead_{ahead.info.backend_pid}"
        copy_slot(ahead, self.options.slot, name)
        advance_slot(ahead, name, split)
        options = dataclasses.replace(self.options, slot=name)
        messages = peek(ahead, options, upto_lsn=self.window.upto, upto_nchanges=self.limit)
        return tuple(itertools.islice(messages, 1)), messages

    def _first_piece(self, upto: Lsn) -> Iterator[RawMessages]:
        messages = peek(self.connection, self.options, upto_lsn=upto, upto_nchanges=self.limit)
        with contextlib.closing(messages):
            yield from self._piece(messages, upto)

    def _second_piece(self, decoded: Future[_Begun]) -> Iterator[RawMessages]:
        try:
            head, rest = decoded.result()
        except (CdcReplayError, psycopg.Error) as error:
            self._refuse(error)
        else:
            yield from self._piece(itertools.chain(head, rest), self.window.upto)

    def _piece(self, messages: Iterator[RawMessages], upto: Lsn) -> Iterator[RawMessages]:
        count = 0
        for batch in messages:
            count += len(batch.lsn)
            yield batch
        if self.limit is None or count < self.limit:
            self.complete_upto = upto

    def _refuse(self, error: Exception) -> None:
        logger.info("no copy of slot %s is read ahead: %s", self.options.slot, error)
        self.may_split = False
