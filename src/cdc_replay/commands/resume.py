"""`resume`: let a parked subscription, or parked tables, be replayed again."""

from __future__ import annotations

from collections.abc import Sequence

from cdc_replay.config import Config
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import ResumeResult
from cdc_replay.opening import open_subscription
from cdc_replay.replay.resume import ResumeRequest, resume_subscription


def resume(
    config: Config,
    subscription: str,
    *,
    tables: Sequence[QualifiedName] = (),
    skip: Lsn | None = None,
    accept_null: bool = False,
) -> ResumeResult:
    """Resume the subscription or those of its tables, as `ResumeRequest` says.

    Raises:
        InvalidConfiguration: if the transaction is to be skipped and accepted.
        NotParked: as `resume_subscription`.
    """
    request = ResumeRequest(tables, skip, accept_null)
    with open_subscription(config, subscription, "resume") as session:
        change_log = config.publisher(session.subscription.publisher).change_log
        return resume_subscription(request, session, change_log)
