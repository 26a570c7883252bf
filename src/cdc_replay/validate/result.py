"""The result of `validate`, as it is recorded and printed."""

from __future__ import annotations

from collections.abc import Sequence

from cdc_replay.compare.comparison import ValidatedTable
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.results import Json, ValidateResult
from cdc_replay.validate.verdict import TableVerdict, Verdict


def to_result(
    verdict: Verdict, tables: Sequence[ValidatedTable], from_lsn: Lsn, seconds: float
) -> ValidateResult:
    """The verdict of `tables` as a result; a changed definition is named for each table that fails."""
    failed = {table.name for table in verdict.tables if not table.success}
    failures = (
        *verdict.describe_failures(),
        *(
            f"{table.table.table.name}: {table.notice}"
            for table in tables
            if table.notice and table.table.table.name in failed
        ),
    )
    return ValidateResult(
        subscription=verdict.subscription,
        from_lsn=from_lsn,
        to_lsn=verdict.lsn,
        seconds=seconds,
        success=verdict.success,
        tables=tuple(_table_to_json(table) for table in verdict.tables),
        report=verdict.report,
        data_docs=verdict.data_docs,
        error=None if verdict.success else "\n".join(failures) or "not consistent",
    )


def summarize(verdict: Verdict) -> dict[str, int | float | str | bool]:
    """The verdict as the history of the subscription keeps it (`subscriber.history`)."""
    return {
        "consistent": verdict.success,
        "tables": len(verdict.tables),
        "differing_tables": sum(not table.success for table in verdict.tables),
        "differing_rows": sum(count for table in verdict.tables for _, count in table.counts),
        "seconds": verdict.seconds,
        "report": verdict.report.name,
    }


def _table_to_json(verdict: TableVerdict) -> dict[str, Json]:
    return {
        "table": str(verdict.name),
        "success": verdict.success,
        "publisher_rows": verdict.publisher_rows,
        "subscriber_rows": verdict.subscriber_rows,
        "differences": {kind.value: count for kind, count in verdict.counts},
        "notes": list(verdict.notes),
    }
