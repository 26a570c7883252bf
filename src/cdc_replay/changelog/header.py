"""The header of a change log: whose changes it holds. It is kept as properties of the table of changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from cdc_replay.changelog.segment import RESTORE
from cdc_replay.errors import ChangeLogDamaged, InvalidLsn
from cdc_replay.model.database import Database
from cdc_replay.model.lsn import Lsn

FORMAT: Final = "1"
"""The version of the log's layout, written into the header."""

_PREFIX: Final = "cdc_replay."


@dataclass(frozen=True, slots=True)
class LogHeader:
    """Which changes the log holds: those of one slot, timeline and database, after `start_lsn`."""

    system_identifier: str
    timeline: int
    slot: str
    start_lsn: Lsn
    database: Database

    def to_configuration(self) -> dict[str, str]:
        """The header as table properties."""
        values = {
            "format": FORMAT,
            "system_identifier": self.system_identifier,
            "timeline": str(self.timeline),
            "slot": self.slot,
            "start_lsn": str(self.start_lsn),
            "database_oid": str(self.database.oid),
            "database_name": self.database.name,
        }
        return {_PREFIX + name: value for name, value in values.items()}

    @classmethod
    def from_configuration(cls, uri: str, configuration: Mapping[str, str]) -> Self:
        """The header in the properties of the log at `uri`.

        Raises:
            ChangeLogDamaged: if a property is missing or unreadable, or the log has another format.
        """
        try:
            header = cls(
                system_identifier=configuration[_PREFIX + "system_identifier"],
                timeline=int(configuration[_PREFIX + "timeline"]),
                slot=configuration[_PREFIX + "slot"],
                start_lsn=Lsn.parse(configuration[_PREFIX + "start_lsn"]),
                database=Database(
                    int(configuration[_PREFIX + "database_oid"]), configuration[_PREFIX + "database_name"]
                ),
            )
        except KeyError as error:
            raise ChangeLogDamaged(
                f'"{uri}" is not a change log of cdc-replay',
                detail=f"Its table lacks {error}.",
                hint=RESTORE,
            ) from None
        except (ValueError, InvalidLsn) as error:
            raise ChangeLogDamaged(
                f'the properties of "{uri}" are not those of a change log',
                detail=f"A property cannot be read: {error}",
                hint=RESTORE,
            ) from None
        if (log_format := configuration.get(_PREFIX + "format")) != FORMAT:
            raise ChangeLogDamaged(
                f'change log "{uri}" has format {log_format}, this version reads {FORMAT}',
                hint="Use the version of cdc-replay that wrote it.",
            )
        return header
