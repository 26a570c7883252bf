"""What both sides have in common: the connection, the clock, a role that is no superuser."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from cdc_replay.model.check import Check, Verdict
from cdc_replay.model.duration import duration_in_words
from cdc_replay.postgres.connection import Connection, superuser

SKEW_SECONDS: Final = 5.0
"""A lag in seconds is wrong by the difference of the clocks."""

LISTED: Final = 3
"""How many statements a check names."""

_CLOCK: Final = "select extract(epoch from pg_catalog.clock_timestamp())::float8"


def check_session(subject: str, connection: Connection, script: str) -> Iterator[Check]:
    """Version, clock and role of a server that has answered; `script` prints what a role lacks."""
    version = connection.info.parameter_status("server_version") or "unknown"
    yield Check(subject, Verdict.OK, f"PostgreSQL {version} answers")
    if (role := superuser(connection)) is not None:
        remedy = f"Use a role that may only log in, with the grants that `{script}` prints for it."
        yield Check(subject, Verdict.WARNING, f'role "{role}" is a superuser, which it need not be', remedy)
    before = time.time()
    ((server,),) = connection.execute(_CLOCK).fetchall()
    # The server has read its clock between the two moments.
    skew = max(before - server, server - time.time(), 0.0)
    if skew > SKEW_SECONDS:
        message = f"its clock differs from this machine's by {duration_in_words(skew)}"
        remedy = "Synchronize both with NTP: the lag in seconds and ages are wrong by as much."
        yield Check(subject, Verdict.WARNING, message, remedy)
    else:
        yield Check(subject, Verdict.OK, "its clock agrees with this machine's")


def setup_script(publisher: str, subscription: str | None = None) -> str:
    """The command that prints what an administrator runs on the publisher, or on a subscriber."""
    side = "" if subscription is None else f" --subscription {subscription}"
    return f"cdc-replay setup {publisher} --dry-run{side}"


def check_grants(subject: str, statements: tuple[str, ...], script: str) -> Check:
    """Whether the role lacks privileges that `script` prints."""
    if not statements:
        return Check(subject, Verdict.OK, "the role has the privileges that it needs")
    more = f" and {len(statements) - LISTED} more" if len(statements) > LISTED else ""
    message = f"the role lacks privileges: {'; '.join(statements[:LISTED])}{more}"
    return Check(
        subject, Verdict.FAILED, message, f"Let an administrator run in psql what `{script}` prints."
    )
