"""What a validation reads of earlier ones on the subscriber, and what it leaves there."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Collection, Mapping

from cdc_replay.compare.comparison import ValidatedTable
from cdc_replay.model.proof import TableProof
from cdc_replay.model.relation import QualifiedName
from cdc_replay.model.results import ValidateResult
from cdc_replay.model.validation_scope import ValidationPlan, ValidationScope
from cdc_replay.postgres.connection import Connection
from cdc_replay.subscriber import history, proofs, recorded_results
from cdc_replay.validate.result import summarize, tables_seen
from cdc_replay.validate.selection import Selection, select_tables
from cdc_replay.validate.verdict import Verdict

logger = logging.getLogger(__name__)


def select_by_proofs(
    connection: Connection,
    subscription: str,
    tables: tuple[ValidatedTable, ...],
    plan: ValidationPlan,
    scope: ValidationScope,
    now: dt.datetime,
) -> Selection:
    """What of `tables` to compare, by what is proved of them already.

    Raises:
        InvalidConfiguration: if the scope names a table that is not in the subscription.
    """
    selection = select_tables(tables, _proofs_by_name(connection, subscription), plan, scope, now)
    for unknown in selection.unknown:
        logger.warning(
            "subscription %s: validate.tables plans %s, which is no published table of it",
            *(subscription, unknown),
        )
    return selection


def select_again(
    connection: Connection, subscription: str, tables: tuple[ValidatedTable, ...], before: Selection
) -> Selection:
    """What was selected before, to be compared once more."""
    return before.again(tables, _proofs_by_name(connection, subscription))


def record_validation(
    connection: Connection, result: ValidateResult, verdict: Verdict, published: Collection[QualifiedName]
) -> None:
    """Store the result, a line of the history, and what is proved of the `published` tables now."""
    name = result.subscription
    with connection.transaction():
        recorded_results.record_result(connection, name, "validate", result.to_dict())
        history.append_validation(connection, name, result.to_lsn, summarize(verdict))
        proofs.record_proofs(
            connection,
            name,
            result.to_lsn,
            tables_seen(verdict),
            published=published,
            owed={left.name: left.owed for left in verdict.left_out if left.owed},
        )


def _proofs_by_name(connection: Connection, subscription: str) -> Mapping[QualifiedName, TableProof]:
    return {entry.name: entry.proof for entry in proofs.read_proofs(connection, subscription)}
