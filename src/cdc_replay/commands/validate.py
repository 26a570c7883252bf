"""`validate`: prove that the subscriber holds what the publications say, at one LSN, under live writes.

A snapshot of the publisher is exported; its consistent point is the fence. The log is captured and replayed
up to exactly that point while the subscription's lock is held, then both sides are compared. Others may go on
with the subscription until the snapshot is there; if they pass it, it is exported again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cdc_replay.catalog.reader import read_catalog
from cdc_replay.commands.capture import captured_up_to
from cdc_replay.commands.replay import replay_opened
from cdc_replay.compare.comparison import ValidatedTable
from cdc_replay.compare.fence import open_fence
from cdc_replay.config import Config
from cdc_replay.errors import NotConsistent
from cdc_replay.failpoints import failpoint
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import Json, Result
from cdc_replay.postgres.connection import connect
from cdc_replay.postgres.exported_snapshot import import_snapshot
from cdc_replay.publication.mirror import why_not_mirrored
from cdc_replay.publication.resolve import synced_tables
from cdc_replay.replay.definition_drift import changed_filters
from cdc_replay.replay.table_rewrites import rewritten_tables
from cdc_replay.subscriber import state
from cdc_replay.subscriber.owners import Rights
from cdc_replay.subscriber.session import Opened, exported_behind, opened
from cdc_replay.subscriber.tables import read_target_tables
from cdc_replay.validate.run import ValidationRequest, validate_subscription
from cdc_replay.validate.verdict import TableVerdict, Verdict

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ValidateResult(Result):
    """The verdict of one validation; `error` is set where the subscriber is not consistent."""

    subscription: str
    from_lsn: Lsn
    to_lsn: Lsn
    seconds: float
    success: bool
    tables: tuple[Mapping[str, Json], ...]
    report: Path
    data_docs: Path
    error: str | None


def validate(config: Config, subscription: str) -> ValidateResult:
    """Compare the subscriber with the publisher at a fence LSN and write the report.

    Raises:
        NotConsistent: if the subscriber could not be brought to the fence.
    """
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        request, from_lsn = _at_the_fence(config, subscription, stack)
        # Both sides are fixed now: others may go on with the subscription while it is compared.
        failpoint("validate.after_fence")
        verdict = validate_subscription(request)
        failpoint("validate.after_report")
    result = _result(verdict, request.tables, from_lsn, began)
    dsn = config.dsn_of(config.subscription(subscription))
    with connect(dsn, purpose=f"validate {subscription}") as connection:
        state.record_result(connection, subscription, "validate", result.to_dict())
    log.info(
        "subscription %s: %s at %s, %d tables, %.2f s",
        subscription,
        "consistent" if verdict.success else "NOT consistent",
        verdict.lsn,
        len(verdict.tables),
        result.seconds,
    )
    return result


def _at_the_fence(
    config: Config, subscription: str, stack: contextlib.ExitStack
) -> tuple[ValidationRequest, Lsn]:
    """Bring the subscriber to a fence and open both sides there, for as long as `stack`.

    Also returns where the subscription was before. Its lock is held until both sides are open.
    """
    publisher = config.publisher(config.subscription(subscription).subscription.publisher)
    with (
        opened(config, subscription, "validate") as at_work,
        exported_behind(config, at_work) as exported,
    ):
        fence_lsn = exported.consistent_point
        captured_up_to(config, publisher.name, fence_lsn)
        (replayed,) = replay_opened(config, publisher, [at_work], fence_lsn, fence=exported)
        if replayed.error is not None:
            raise NotConsistent(
                f'subscription "{subscription}" could not be replayed to the fence {fence_lsn}',
                detail=replayed.error,
            )
        with import_snapshot(exported, purpose="catalog") as connection:
            catalog = read_catalog(connection, fence_lsn)
        changed = changed_filters(at_work.connection, at_work.subscription, publisher.change_log, catalog)
        notices = {table: each.notice for table, each in changed.items()}
        for table, each in rewritten_tables(at_work.connection, subscription).items():
            notices[table] = "; ".join([*filter(None, [notices.get(table)]), each.notice])
        tables = validated_tables(at_work, catalog, notices)
        has_tables_of_others = any(
            each.target is not None and each.target.acting.rights is not Rights.OWN for each in tables
        )
        fence = stack.enter_context(
            open_fence(exported, at_work.dsn, subscription, has_tables_of_others=has_tables_of_others)
        )
    return ValidationRequest(subscription, fence, tables, config.expectations), replayed.from_lsn


def validated_tables(
    at_work: Opened, catalog: PublisherCatalog, notices: Mapping[QualifiedName, str]
) -> tuple[ValidatedTable, ...]:
    """The subscription's tables with how each of them can be judged.

    One whose filter has changed is judged as any other: native keeps such rows too (R9.12), but they are not
    what the publications say. It is told where they come from: `notices`, also of a rewrite (R11.9).
    """
    publications = at_work.subscription.publications
    synced = {each.table.name: each for each in synced_tables(catalog, publications)}
    # One that was dropped on the subscriber fails, whatever has its name now.
    known = {each.name or each.recorded_name for each in at_work.known_tables()}
    subscribed = {name: each for name, each in synced.items() if name in known}
    run_as_owner = at_work.subscription.run_as_owner
    targets = read_target_tables(at_work.connection, tuple(subscribed), run_as_owner=run_as_owner)
    found = []
    for name, each in subscribed.items():
        reason = why_not_mirrored(catalog, publications, each)
        notice = notices.get(name, "")
        found.append(ValidatedTable(each, targets.get(name), reason is None, reason or "", notice))
    return tuple(found)


def _result(
    verdict: Verdict, tables: Sequence[ValidatedTable], from_lsn: Lsn, began: float
) -> ValidateResult:
    failed = {each.name for each in verdict.tables if not each.success}
    failures = (
        *verdict.describe_failures(),
        *(
            f"{each.table.table.name}: {each.changed}"
            for each in tables
            if each.changed and each.table.table.name in failed
        ),
    )
    return ValidateResult(
        subscription=verdict.subscription,
        from_lsn=from_lsn,
        to_lsn=verdict.lsn,
        seconds=time.monotonic() - began,
        success=verdict.success,
        tables=tuple(_table(each) for each in verdict.tables),
        report=verdict.report,
        data_docs=verdict.data_docs,
        error=None if verdict.success else "\n".join(failures) or "not consistent",
    )


def _table(verdict: TableVerdict) -> dict[str, Json]:
    return {
        "table": str(verdict.name),
        "success": verdict.success,
        "publisher_rows": verdict.publisher_rows,
        "subscriber_rows": verdict.subscriber_rows,
        "differences": {kind.value: count for kind, count in verdict.counts},
        "notes": list(verdict.notes),
    }
