"""How many row changes a core decodes per second.

    make env && PYTHONPATH=tools:tests .venv/bin/python -m benchmarks.decode

UPDATEs of a table with six columns, with the old and the new row (REPLICA IDENTITY FULL), in batches as
large as the log's row groups. What is counted is the processor time of this process, the best of several
rounds, so that other work on the machine does not matter much.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final

from cdc_replay.model.lsn import Lsn, Window
from cdc_replay.pgoutput import messages as m
from cdc_replay.pgoutput.columnar import ChangeDecoder
from cdc_replay.pgoutput.reader import decode
from unit.pgoutput.wire import encode, log_batch, log_row, relation

if TYPE_CHECKING:
    import pyarrow as pa

ROWS: Final = 50_000
ROUNDS: Final = 10
BATCHES_PER_ROUND: Final = 10
TABLE: Final = relation(6)


def row(number: int) -> m.TupleData:
    """An order: id, customer, time, amount, state, note."""
    values = (str(number), f"customer {number % 9999}", "2013-01-01 05:15:00+00", "149.90", "shipped",
              f"a short note about {number}")  # fmt: skip
    return m.TupleData((m.TupleKind.TEXT,) * len(values), tuple(value.encode() for value in values))


def updates() -> list[bytes]:
    """The messages of a batch."""
    changes = (
        m.Update(None, TABLE.id, m.OldTuple.FULL, row(number), row(number + 1)) for number in range(ROWS)
    )
    return [encode(change) for change in changes]


def columnar_seconds(batch: pa.RecordBatch) -> float:
    """The least processor time of a batch."""
    decoder = ChangeDecoder.from_relations(Window(Lsn(0), Lsn(2**63 - 1)), {TABLE.version: TABLE}, [(0, 0)])
    decoder.decode(batch)
    rounds = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(BATCHES_PER_ROUND):
            decoder.decode(batch)
        rounds.append(time.process_time() - began)
    return min(rounds) / BATCHES_PER_ROUND


def reference_seconds(messages: list[bytes]) -> float:
    """The processor time that the reference reader takes for a batch."""
    began = time.process_time()
    for message in messages:
        decode(message)
    return time.process_time() - began


def report(name: str, seconds: float, size_bytes: int) -> None:
    rates = f"{ROWS / seconds / 1e6:.2f} million row changes, {size_bytes / seconds / 1e6:.0f} MB per second"
    sys.stdout.write(f"{name:9} {rates} of one core\n")


def main() -> None:
    messages = updates()
    size_bytes = sum(map(len, messages))
    sys.stdout.write(f"UPDATEs with old and new row, 6 columns, {size_bytes / ROWS:.0f} bytes each\n")
    batch = log_batch([log_row(message, seq=seq) for seq, message in enumerate(messages)])
    report("columnar", columnar_seconds(batch), size_bytes)
    report("reference", reference_seconds(messages), size_bytes)


if __name__ == "__main__":
    main()
