"""Sensors that wait for a subscription. They ask once, and then occupy no worker: a triggerer waits for them.

`timeout`, `poke_interval` and `soft_fail` are those of Airflow's sensors.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from airflow.sdk import BaseSensorOperator, Context
from airflow.sdk.exceptions import AirflowFailException

from cdc_replay.airflow.conditions import CaughtUp, Condition, LagBelow, Proved
from cdc_replay.airflow.connections import airflow_config
from cdc_replay.airflow.operators.failures import fail_fast_on_permanent_error
from cdc_replay.airflow.triggers import ConditionTrigger
from cdc_replay.errors import CdcReplayError, Retry


class SubscriptionSensor(BaseSensorOperator):
    """Wait for a condition of a subscription.

    :param subscription: name of the subscription in the configuration (templated)
    """

    template_fields: Sequence[str] = ("subscription",)

    def __init__(self, *, subscription: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.subscription = subscription

    @abstractmethod
    def condition(self) -> CaughtUp | LagBelow | Proved:
        """What the sensor waits for."""

    def execute(self, context: Context) -> None:
        with fail_fast_on_permanent_error():
            condition = self.condition()
            # Airflow can fail a task whose trigger fires before the scheduler has seen that it is deferred.
            if self._is_met(condition):
                return
        self.log.info("waiting for %s", condition)
        self.defer(
            trigger=ConditionTrigger(
                type(condition).__name__, dataclasses.asdict(condition), self.poke_interval
            ),
            method_name="finish",
            timeout=timedelta(seconds=self.timeout),
        )

    def _is_met(self, condition: Condition) -> bool:
        try:
            return condition.is_met()
        except CdcReplayError as error:
            if error.retry is Retry.NEVER:
                raise
            self.log.warning("the triggerer asks again: %s", error)
            return False

    def finish(self, context: Context, event: str | None = None) -> None:
        """Succeed, or fail for the permanent error that the trigger met."""
        if event is not None:
            raise AirflowFailException(event)


class CaughtUpSensor(SubscriptionSensor):
    """Wait until a subscription has every transaction that its publisher has committed up to a position.

    :param lsn: default: the publisher's WAL position when the task starts (templated)
    """

    template_fields: Sequence[str] = ("subscription", "lsn")

    def __init__(self, *, lsn: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lsn = lsn

    def condition(self) -> CaughtUp:
        return CaughtUp(self.subscription, self.lsn or self._position())

    def _position(self) -> str:
        from cdc_replay.monitoring.progress import publisher_position

        config = airflow_config()
        publisher = config.subscription(self.subscription).subscription.publisher
        return str(publisher_position(config, publisher))


class LagSensor(SubscriptionSensor):
    """Wait until a subscription lags its change log by no more than so many seconds.

    :param seconds: the age that the oldest transaction which is not applied may have
    """

    def __init__(self, *, seconds: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seconds = seconds

    def condition(self) -> LagBelow:
        return LagBelow(self.subscription, self.seconds)


class ProofSensor(SubscriptionSensor):
    """Wait until all rows of all tables were proven equal, the oldest of them recently.

    :param within: the age that it may have
    """

    def __init__(self, *, within: timedelta, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.within = within

    def condition(self) -> Proved:
        return Proved(self.subscription, self.within.total_seconds())
