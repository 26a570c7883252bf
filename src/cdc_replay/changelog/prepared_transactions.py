"""Prepared transactions without outcome, one file each.

The slot sends the content of a prepared transaction once, at PREPARE; COMMIT PREPARED comes alone, perhaps
many pulls later (R9.8). So the content is stored here until the outcome, keyed by xid and the end LSN of the
prepare record. Writing is idempotent: a transaction always has the same file name and content, and an
existing file is replaced atomically.

| crash after                             | what the next pull does                                         |
|-----------------------------------------|-----------------------------------------------------------------|
| the file, before the commit of its pull | the file is deleted; the slot sends the transaction again       |
| the commit of the outcome's pull        | the slot sends the outcome again: skipped, the file is deleted  |

The file is deleted because the server may have become one that never had the transaction, such as a promoted
standby. There another one may have its xid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from cdc_replay.changelog.segment import EVERYTHING, SegmentWriter, plan_row_groups, read_row_group
from cdc_replay.changelog.storage import (
    PARTIAL,
    Location,
    delete_files,
    make_folder,
    storage_write_errors,
    sync_folder,
)
from cdc_replay.errors import ChangeLogDamaged, InvalidLsn
from cdc_replay.model.lsn import Lsn

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True, order=True)
class PreparedKey:
    """A prepared transaction: its xid, and the end LSN of its prepare record."""

    xid: int
    end_lsn: Lsn

    @property
    def file_name(self) -> str:
        """The name of its file."""
        return f"{self.xid}_{self.end_lsn.file_name}.parquet"

    @classmethod
    def parse(cls, name: str) -> Self:
        """The key of a file name.

        Raises:
            ValueError, InvalidLsn: if it is no such name.
        """
        xid, _, lsn = name.removesuffix(".parquet").partition("_")
        return cls(int(xid), Lsn.parse(lsn.replace("-", "/")))


class PreparedTransactions:
    """The folder of prepared transactions; every method reads the current files."""

    def __init__(self, folder: Location) -> None:
        self._folder = folder

    def store(self, key: PreparedKey, batches: Iterable[pa.RecordBatch]) -> bool:
        """Store the content of a transaction, durably; False if it is empty, and nothing is stored (R9.9).

        Raises:
            ChangeLogNotWritable: if the file cannot be written; it is deleted then.
        """
        with storage_write_errors(self._folder.uri):
            make_folder(self._folder)
            with SegmentWriter(self._folder, key.file_name) as writer:
                for batch in batches:
                    writer.write(batch)
        return writer.segment is not None

    def content(self, key: PreparedKey) -> Iterator[pa.RecordBatch]:
        """The batches that `store` stored.

        Raises:
            ChangeLogDamaged: if the file cannot be read.
        """
        for group in plan_row_groups(self._folder / key.file_name, EVERYTHING):
            yield read_row_group(group)

    def remove(self, keys: Iterable[PreparedKey]) -> None:
        """Delete transactions whose outcome is durable elsewhere, durably.

        Raises:
            ChangeLogNotWritable: if a file cannot be deleted.
        """
        with storage_write_errors(self._folder.uri):
            if delete_files(self._folder, [key.file_name for key in keys]):
                sync_folder(self._folder)

    def remove_dead(self, end: Lsn) -> int:
        """Delete what pulls left that died before their commit, durably; returns the number of files.

        `end` is the log's end. Only for the process that holds the slot.

        Raises:
            ChangeLogNotWritable: if a file cannot be deleted.
            ChangeLogDamaged: as for `list_keys`.
        """
        names = self._folder.names()
        parts = [name for name in names if name.startswith(PARTIAL)]
        dead = [key.file_name for key in self._keys(names) if key.end_lsn > end]
        with storage_write_errors(self._folder.uri):
            if removed := delete_files(self._folder, [*parts, *dead]):
                sync_folder(self._folder)
        return removed

    def list_keys(self) -> tuple[PreparedKey, ...]:
        """All stored transactions, ordered by xid and prepare LSN.

        Raises:
            ChangeLogDamaged: if there is another file.
        """
        return self._keys(self._folder.names())

    def _keys(self, names: Iterable[str]) -> tuple[PreparedKey, ...]:
        return tuple(sorted(self._key(name) for name in names if not name.startswith(PARTIAL)))

    def _key(self, name: str) -> PreparedKey:
        try:
            return PreparedKey.parse(name)
        except (ValueError, InvalidLsn) as error:
            # It may be a transaction that somebody has renamed, which must not be lost.
            raise ChangeLogDamaged(
                f'"{self._folder.uri}" contains a file that is not a prepared transaction',
                detail=f"It is {name!r}.",
                hint="Remove the file if it was not written by cdc-replay.",
            ) from error
