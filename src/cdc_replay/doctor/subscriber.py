"""A subscriber: writable, with the tables, columns and privileges that the subscription needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import psycopg

from cdc_replay.doctor.server import check_grants, check_session, setup_script
from cdc_replay.errors import CdcReplayError
from cdc_replay.model.check import Check, Verdict, failed_check
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.subscription import Subscription
from cdc_replay.postgres.connection import READ_ONLY_REMEDY, Connection, connect_with_deadline, is_read_only
from cdc_replay.subscriber.grants import plan_role_script
from cdc_replay.subscriber.target_checks import check_targets
from cdc_replay.subscriber.target_tables import read_target_tables

Columns = Mapping[QualifiedName, tuple[str, ...]]


def check_subscriber(
    subscription: Subscription, dsn: str, columns: Columns | None, seconds: float
) -> Iterator[Check]:
    """The checks of one subscription; `columns` are the published ones by table, None if not known."""
    subject, script = (
        f"subscription {subscription.name}",
        setup_script(subscription.publisher, subscription.name),
    )
    try:
        purpose = f"doctor {subscription.name}"
        with connect_with_deadline(dsn, purpose=purpose, seconds=seconds) as connection:
            yield from check_session(subject, connection, script)
            if is_read_only(connection):
                yield Check(subject, Verdict.FAILED, "the database is read-only", READ_ONLY_REMEDY)
            if columns is not None:
                yield from _tables(subject, connection, subscription, columns)
    except (CdcReplayError, psycopg.Error) as error:
        yield failed_check(subject, error)
    if columns is None:
        message = f"its tables are not checked: publisher {subscription.publisher} does not say which"
        yield Check(subject, Verdict.WARNING, message, "Put the publisher right first.")


def _tables(
    subject: str, connection: Connection, subscription: Subscription, columns: Columns
) -> Iterator[Check]:
    run_as_owner = subscription.run_as_owner
    statements, warnings = plan_role_script(connection, list(columns), run_as_owner=run_as_owner)
    yield check_grants(subject, statements, setup_script(subscription.publisher, subscription.name))
    for warning in warnings:
        yield Check(subject, Verdict.WARNING, warning)
    try:
        check_targets(columns, read_target_tables(connection, columns, run_as_owner=run_as_owner))
    except CdcReplayError as error:
        yield failed_check(subject, error)
        return
    count = len(columns)
    yield Check(subject, Verdict.OK, f"published tables with all their columns: {count} of {count}")
