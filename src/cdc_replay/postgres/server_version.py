"""The major versions of PostgreSQL that a publisher may have.

Only tested versions are supported, because a version can extend the catalogs: in 19 a membership may be an
exception, and code that reads it as a membership would publish what was excluded (R2.18).
"""

from __future__ import annotations

from typing import Final

from cdc_replay.errors import PublisherNotReady
from cdc_replay.postgres.connection import Connection

TESTED_VERSIONS: Final = (15, 16, 17, 18)
"""The major versions on which all tests have passed, in order."""


def version_problem(connection: Connection) -> PublisherNotReady | None:
    """Why the server cannot be a publisher; None if its version was tested (R2.18)."""
    major = connection.info.server_version // 10000
    if major in TESTED_VERSIONS:
        return None
    version = connection.info.parameter_status("server_version") or str(major)
    oldest, newest = TESTED_VERSIONS[0], TESTED_VERSIONS[-1]
    return PublisherNotReady(
        f"the publisher is PostgreSQL {version}, which was not tested",
        detail=f"Versions {oldest} to {newest} are tested; another one may have other kinds of publications.",
        hint=f"Upgrade it to {oldest} or later."
        if major < oldest
        else f"Use a release of cdc-replay that was tested with {major}, or a publisher with {newest}.",
        rule="R2.18",
    )


def check_version(connection: Connection) -> None:
    """Check that the publisher's version was tested.

    Raises:
        PublisherNotReady: naming its version.
    """
    if (problem := version_problem(connection)) is not None:
        raise problem
