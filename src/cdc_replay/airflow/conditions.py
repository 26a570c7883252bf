"""What a sensor waits for: values that a trigger can store, each of which asks the servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from cdc_replay.airflow.connections import airflow_config
from cdc_replay.model.lsn import Lsn


class Condition(Protocol):
    """A dataclass of JSON values."""

    def is_met(self) -> bool:
        """Ask the servers.

        Raises:
            CdcReplayError: if they do not answer.
        """


@dataclass(frozen=True)
class CaughtUp:
    """The subscription has every transaction up to `lsn`."""

    subscription: str
    lsn: str

    def is_met(self) -> bool:
        from cdc_replay.monitoring.progress import has_applied

        return has_applied(airflow_config(), self.subscription, Lsn.parse(self.lsn))


@dataclass(frozen=True)
class LagBelow:
    """The oldest captured transaction that the subscription lacks is younger than `seconds`."""

    subscription: str
    seconds: float

    def is_met(self) -> bool:
        from cdc_replay.monitoring.progress import read_progress

        lag = read_progress(airflow_config(), self.subscription).lag_seconds
        return lag is not None and lag <= self.seconds


@dataclass(frozen=True)
class Proved:
    """All rows of all tables were proven equal, the oldest of them not more than `seconds` ago."""

    subscription: str
    seconds: float

    def is_met(self) -> bool:
        from cdc_replay.monitoring.progress import read_progress

        age = read_progress(airflow_config(), self.subscription).proof_age_seconds
        return age is not None and age <= self.seconds


_CONDITIONS: Final[Mapping[str, type[CaughtUp | LagBelow | Proved]]] = {
    condition.__name__: condition for condition in (CaughtUp, LagBelow, Proved)
}


def condition_of(kind: str, arguments: Mapping[str, Any]) -> Condition:
    """The condition of that name."""
    return _CONDITIONS[kind](**arguments)
