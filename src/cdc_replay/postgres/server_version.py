"""Which major versions of PostgreSQL a publisher may have.

What a version adds to the catalogs is known once it has been tested: of 19 a membership may be an exception,
and whoever reads it as a member publishes what was excluded (R2.18).
"""

from __future__ import annotations

from typing import Final

from cdc_replay.errors import PublisherNotReady
from cdc_replay.postgres.connection import Connection

TESTED_VERSIONS: Final = (15, 16, 17, 18)
"""The major versions on which all tests have passed, in order."""


def version_problem(connection: Connection) -> PublisherNotReady | None:
    """Why the server cannot be a publisher, None if it has a version that was tested (R2.18)."""
    major = connection.info.server_version // 10000
    if major in TESTED_VERSIONS:
        return None
    version = connection.info.parameter_status("server_version") or str(major)
    oldest, newest = TESTED_VERSIONS[0], TESTED_VERSIONS[-1]
    return PublisherNotReady(
        f"the publisher is PostgreSQL {version}, which was not tested",
        detail=f"Tested are {oldest} to {newest}; what its publications mean beyond that is not known.",
        hint=f"Upgrade it to {oldest} or later."
        if major < oldest
        else f"Use a release of cdc-replay that was tested with {major}, or a publisher of {newest}.",
        rule="R2.18",
    )


def check_version(connection: Connection) -> None:
    """Check that the publisher has a version that was tested.

    Raises:
        PublisherNotReady: naming its version.
    """
    if (problem := version_problem(connection)) is not None:
        raise problem
