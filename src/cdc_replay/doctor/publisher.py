"""The publisher: settings, privileges, headroom, publications, and whether it is set up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import psycopg

from cdc_replay.capture.grants import plan_grants
from cdc_replay.capture.publisher_status import slot_state
from cdc_replay.capture.setup import SetupRequest, setup_publisher
from cdc_replay.catalog.reader import read_catalog
from cdc_replay.doctor.server import check_grants, check_session, setup_script
from cdc_replay.errors import CdcReplayError
from cdc_replay.model.check import Check, Verdict, failed_check
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.model.size import size_in_words
from cdc_replay.model.status import PublisherState
from cdc_replay.postgres.connection import Connection, connect_with_deadline
from cdc_replay.postgres.slot import server_problems, slot_exists, slot_status

_HEADROOM: Final = """
    select pg_catalog.current_setting('max_replication_slots')::int,
           (select pg_catalog.count(*) from pg_catalog.pg_replication_slots),
           pg_catalog.current_setting('max_wal_senders')::int,
           (select pg_catalog.count(*) from pg_catalog.pg_stat_activity where backend_type = 'walsender')
"""


def check_publisher(request: SetupRequest, seconds: float, max_retained_wal: int | None) -> Iterator[Check]:
    """The checks of one publisher; a server that does not answer is one that failed."""
    subject = f"publisher {request.publisher}"
    try:
        purpose = f"doctor {request.publisher}"
        with connect_with_deadline(request.dsn, purpose=purpose, seconds=seconds) as connection:
            yield from check_session(subject, connection, setup_script(request.publisher))
            yield from _server(subject, connection)
            yield from _headroom(subject, connection, request.slot, max_retained_wal)
            catalog = read_catalog(connection, texts=False)
            yield _grants(connection, request, catalog)
        yield from _setup(subject, request)
    except (CdcReplayError, psycopg.Error) as error:
        yield failed_check(subject, error)


def _server(subject: str, connection: Connection) -> Iterator[Check]:
    problems = server_problems(connection)
    for problem in problems:
        yield failed_check(subject, problem)
    if not problems:
        yield Check(subject, Verdict.OK, "wal_level is logical, and the role may replicate")


def _headroom(subject: str, connection: Connection, slot: str, limit: int | None) -> Iterator[Check]:
    [(slots, used_slots, senders, used_senders)] = connection.execute(_HEADROOM).fetchall()
    has_slot = slot_exists(connection, slot)
    for name, most, used in (
        ("max_replication_slots", slots, used_slots),
        ("max_wal_senders", senders, used_senders),
    ):
        message = f"{name}: {used} of {most} in use"
        if most > used:
            yield Check(subject, Verdict.OK, message)
            continue
        needs = "snapshot and validate" if has_slot else "setup, snapshot and validate"
        yield Check(
            subject,
            Verdict.WARNING if has_slot else Verdict.FAILED,
            message,
            f"Raise it and restart the server, or drop an unused one: {needs} need one more.",
        )
    if has_slot:
        yield _slot(subject, connection, slot, limit)


def _slot(subject: str, connection: Connection, slot: str, limit: int | None) -> Check:
    status = slot_status(connection, slot)
    retained = size_in_words(status.retained_wal_bytes or 0)
    match slot_state(status, limit):
        case PublisherState.LOST:
            return Check(
                subject,
                Verdict.FAILED,
                f"replication slot {slot} is lost",
                f"Run `cdc-replay capture {subject.removeprefix('publisher ')}`: its error has the remedy.",
            )
        case PublisherState.NEAR_LOST:
            remedy = f"Run `cdc-replay capture {subject.removeprefix('publisher ')}` now."
            message = f"replication slot {slot} is near lost: it retains {retained} of WAL"
            return Check(subject, Verdict.WARNING, message, remedy)
        case _:
            return Check(subject, Verdict.OK, f"replication slot {slot} retains {retained} of WAL")


def _grants(connection: Connection, request: SetupRequest, catalog: PublisherCatalog) -> Check:
    statements = plan_grants(connection, catalog, request.publications)
    return check_grants(
        f"publisher {request.publisher}",
        tuple(statement.as_string(connection) for statement in statements),
        setup_script(request.publisher),
    )


def _setup(subject: str, request: SetupRequest) -> Iterator[Check]:
    """What `setup` would refuse, warn of, or do."""
    outcome = setup_publisher(request, dry_run=True)
    for warning in outcome.warnings:
        yield Check(subject, Verdict.WARNING, warning)
    missing = [
        statement for statement in outcome.statements if not statement.startswith(("grant ", "alter role "))
    ]
    if missing or outcome.log_created:
        remedy = f"Run `cdc-replay setup {request.publisher}`; with --dry-run it prints what it would do."
        yield Check(subject, Verdict.WARNING, "setup has not run, or has something to add", remedy)
    else:
        yield Check(subject, Verdict.OK, "it is set up for the configured publications")
