"""The result of `validate`, as it is recorded and printed, and what the proofs keep of it."""

from __future__ import annotations

from collections.abc import Sequence

from cdc_replay.compare.comparison import ValidatedTable
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.proof import ProofSummary, TableProof, subscription_proof
from cdc_replay.model.results import Json, ValidateResult, ValidationOutcome
from cdc_replay.subscriber.proofs import TableSeen
from cdc_replay.validate.verdict import LeftOut, TableVerdict, Verdict


def to_result(
    verdict: Verdict, tables: Sequence[ValidatedTable], from_lsn: Lsn, seconds: float
) -> ValidateResult:
    """The verdict of `tables` as a result; a changed definition is named for each table that fails."""
    failed = {table.name for table in verdict.tables if table.fails}
    failures = (
        *verdict.describe_failures(),
        *(
            f"{table.table.table.name}: {table.notice}"
            for table in tables
            if table.notice and table.table.table.name in failed
        ),
    )
    proven = subscription_proof(proofs_of(verdict))
    return ValidateResult(
        subscription=verdict.subscription,
        from_lsn=from_lsn,
        to_lsn=verdict.lsn,
        seconds=seconds,
        success=verdict.success,
        tables=tuple(_table_to_json(table) for table in verdict.tables),
        report=verdict.report,
        data_docs=verdict.data_docs,
        error=None if verdict.success else "\n".join(failures) or verdict.outcome.value,
        outcome=verdict.outcome,
        is_partial=verdict.is_partial,
        left_out=tuple(_left_to_json(left) for left in verdict.left_out),
        not_reached=verdict.describe_not_reached(),
        proven_through=None if proven is None else proven.lsn,
        proven_at=None if proven is None else proven.at.isoformat(),
    )


def summarize(verdict: Verdict) -> dict[str, int | float | str | bool]:
    """The verdict as the history of the subscription keeps it (`subscriber.history`)."""
    return {
        "consistent": verdict.outcome in {ValidationOutcome.CONSISTENT, ValidationOutcome.TOO_OLD},
        "tables": len(verdict.tables),
        "differing_tables": sum(table.fails or table.has_error for table in verdict.tables),
        "differing_rows": sum(count for table in verdict.tables for _, count in table.counts),
        "seconds": verdict.seconds,
        "report": verdict.report.name,
        "is_partial": verdict.is_partial,
    }


def tables_seen(verdict: Verdict) -> tuple[TableSeen, ...]:
    """What the run has seen of each table (`subscriber.proofs`)."""
    return tuple(
        TableSeen(
            table.name,
            row_count=max(table.publisher_rows or 0, table.subscriber_rows or 0),
            differing_rows=sum(count for _, count in table.counts),
            bytes=table.bytes,
            seconds=table.seconds,
            evidence=table.evidence,
            error=table.error or "; ".join(table.check_errors()) or None,
        )
        for table in verdict.tables
    )


def proofs_of(verdict: Verdict) -> list[ProofSummary]:
    """The proofs of all tables of the subscription after the run."""
    proofs = (*(table.proof for table in verdict.tables), *(left.proof for left in verdict.left_out))
    return [proof.summary for proof in proofs if proof is not None]


def _table_to_json(verdict: TableVerdict) -> dict[str, Json]:
    return {
        "table": str(verdict.name),
        "success": verdict.success,
        "publisher_rows": verdict.publisher_rows,
        "subscriber_rows": verdict.subscriber_rows,
        "differences": {kind.value: count for kind, count in verdict.counts},
        "notes": list(verdict.notes),
        "has_error": verdict.has_error,
        "compared_buckets": verdict.compared_buckets,
        "chosen_buckets": verdict.chosen_buckets,
        "bytes": verdict.bytes,
        "seconds": round(verdict.seconds, 3),
        **_proof_to_json(verdict.proof),
    }


def _left_to_json(left: LeftOut) -> dict[str, Json]:
    return {"table": str(left.name), "reason": left.reason.value, **_proof_to_json(left.proof)}


def _proof_to_json(proof: TableProof | None) -> dict[str, Json]:
    summary = ProofSummary() if proof is None else proof.summary
    proven = summary.proven
    return {
        "proof": summary.describe(),
        "proven_through": None if proven is None else str(proven.lsn),
        "proven_at": None if proven is None else proven.at.isoformat(),
    }
