"""Run a validation: compare at the fence, judge by Great Expectations, write the reports.

    compare the tables   → observations             (nothing is written; then the fence is closed)
    checkpoint           → validation result, Data Docs
    page                 → uncommitted/reports/<subscription>/<run>.html, and latest.html next to it

Everything is under `<context root>/gx`, a file Data Context that is created on first use. Suites, checkpoints
and results have the subscription's name, so subscriptions do not touch each other's; the index of the Data
Docs is shared, and a file lock serializes runs. Of each subscription the newest `KEPT_RUNS` results and pages
are kept. A crash leaves at most a result without its page, or a truncated generated file; the next run
generates its files again and adds a result.

No file contains row values other than keys, or a DSN.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import fcntl
import hashlib
import importlib.resources
import logging
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cdc_replay.compare.comparison import Comparison, NotCompared
from cdc_replay.compare.fence import ComparisonFence
from cdc_replay.model.progress import Report, unreported
from cdc_replay.model.proof import BUCKETS
from cdc_replay.private_files import make_folder
from cdc_replay.validate.gx import (
    Checkpoint,
    ExpectationValidationResult,
    FileDataContext,
    RunIdentifier,
    UpdateDataDocsAction,
    ValidationDefinition,
    ValidationResultIdentifier,
    exception_message,
    get_context,
)
from cdc_replay.validate.html_report import remove_old_pages, write_page
from cdc_replay.validate.observe import Observation, observe_tables
from cdc_replay.validate.proof_expectation import ExpectProofToBeRecent
from cdc_replay.validate.report_context import ReportContext, file_name, reports_folder
from cdc_replay.validate.selection import LeftTable, Selection
from cdc_replay.validate.suites import (
    EXPECTATIONS,
    BoundedProof,
    ObservedTable,
    bounded_proofs,
    build_suite,
    comparison_frame,
    escaped,
)
from cdc_replay.validate.verdict import Check, CheckKind, LeftOut, TableVerdict, Verdict

logger = logging.getLogger(__name__)

DATA_CONTEXT: Final = "great_expectations.yml"
DATA_SOURCE: Final = ("cdc_replay", "comparison_at_fence", "all_tables")
"""Data source, asset and batch definition of `great_expectations.yml`."""

EARLIER_DATA_CONTEXTS: Final = frozenset({"709f7105e14e2dc6efdeb4d69fdf81e10972cc8131dbd03a7b8bdbe655d4f534"})
"""SHA-256 of the configurations that earlier versions wrote, which are replaced."""

KEPT_RUNS: Final = 100
"""More than the trend of a report links to. Great Expectations lists all results in each run."""

RUN_PAGES: Final = "[0-9A-F]*-[0-9A-F]*-*Z.html"
"""Pages of runs; certificates are in the same folder."""

GENERATED: Final = ("expectations", "validation_definitions", "checkpoints")
"""Folders of the Data Context with one file per subscription, rewritten by every run."""


@dataclass(frozen=True, slots=True)
class ValidationRequest:
    """What to validate, where to write, and what the report shows beside the verdict.

    `context_root` is the parent of `gx/`, created if missing. Per table, `listed_keys` differing keys of each
    kind are listed. `at` is a time before which the fence did not exist.
    """

    subscription: str
    fence: ComparisonFence
    selection: Selection
    context_root: Path
    context: ReportContext
    listed_keys: int = 20
    with_values: bool = False
    """Whether the report shows the values of listed rows, on both sides."""
    report: Report = unreported
    at: dt.datetime = field(default_factory=lambda: dt.datetime.now(dt.UTC))


@dataclass(frozen=True, slots=True)
class _Judged:
    """The results of Great Expectations: checks by (relation, kind), and its pages."""

    checks: Mapping[tuple[str, CheckKind], Check]
    data_docs: Path
    run_page: Path


@dataclass(frozen=True, slots=True)
class ObservedSubscription:
    """What a run observed, and what it left; `began` is in the clock of `time.monotonic`."""

    began: float
    tables: tuple[ObservedTable, ...]
    left: tuple[LeftTable, ...]


def observe_subscription(request: ValidationRequest) -> ObservedSubscription:
    """Compare the selected tables at the fence, which nothing needs afterwards.

    Raises:
        ServerUnavailable: if a server is lost.
    """
    began = time.monotonic()
    observation = Observation(
        request.subscription,
        request.fence,
        request.at,
        request.listed_keys,
        request.with_values,
        request.report,
    )
    return ObservedSubscription(began, *observe_tables(observation, request.selection))


def judge_subscription(request: ValidationRequest, observed: ObservedSubscription) -> Verdict:
    """Judge what was observed; the verdict is also written to disk.

    Differences and errors of single tables are part of the verdict, not exceptions.
    """
    tables, left = observed.tables, observed.left
    now = dt.datetime.now(dt.UTC)
    proofs = bounded_proofs(tables, left)
    gx_root = _data_context(request.context_root)
    with _exclusive_lock(gx_root):
        judged = _judge(request, tables, proofs, now)
        folder = reports_folder(request.context_root, request.subscription)
        verdict = Verdict(
            subscription=request.subscription,
            lsn=request.fence.lsn,
            tables=tuple(_table_verdict(table, judged.checks) for table in tables),
            data_docs=judged.data_docs,
            report=folder / f"{request.fence.lsn.file_name}-{now:%Y%m%dT%H%M%S%fZ}.html",
            seconds=time.monotonic() - observed.began,
            error=None if tables or left else "the subscription has no tables to validate",
            left_out=tuple(_left_out(table, request.selection, judged.checks) for table in left),
        )
        write_page(verdict, request.context, now=now.astimezone(), run_page=judged.run_page)
        remove_old_pages(folder, RUN_PAGES, KEPT_RUNS)
    logger.info(
        "subscription %s at %s: %s, %d tables, %d fail, %.1f s, report %s",
        *(verdict.subscription, verdict.lsn, verdict.outcome.value),
        *(len(verdict.tables), sum(not table.success for table in verdict.tables)),
        *(verdict.seconds, verdict.report),
    )
    return verdict


def _data_context(context_root: Path) -> Path:
    """The folder of the Data Context, with its configuration file."""
    gx_root = context_root.resolve() / "gx"
    make_folder(gx_root)
    make_folder(gx_root / "uncommitted")
    with _exclusive_lock(gx_root):
        configuration = gx_root / DATA_CONTEXT
        if not configuration.exists() or _digest(configuration) in EARLIER_DATA_CONTEXTS:
            template = importlib.resources.files("cdc_replay.validate") / DATA_CONTEXT
            part = configuration.with_suffix(".part")
            part.write_bytes(template.read_bytes())
            part.replace(configuration)
    return gx_root


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@contextlib.contextmanager
def _exclusive_lock(gx_root: Path) -> Iterator[None]:
    with (gx_root / "uncommitted" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released with the file, also when the process dies
        yield


def _remove_generated(gx_root: Path, name: str) -> None:
    # Great Expectations reads the old file before it writes a new one, and fails if a crash truncated it.
    for folder in GENERATED:
        (gx_root / folder / f"{name}.json").unlink(missing_ok=True)


def _remove_old_results(context: FileDataContext, name: str) -> None:
    """Leave room for one more result; the Data Docs lose the pages of removed ones when they get the next."""
    store = context.validation_results_store
    results = [
        key
        for key in store.list_keys()
        if isinstance(key, ValidationResultIdentifier) and key.expectation_suite_identifier.name == name
    ]
    results.sort(key=lambda key: key.run_id.run_time, reverse=True)
    for key in results[KEPT_RUNS - 1 :]:
        store.remove_key(key)


def _judge(
    request: ValidationRequest,
    tables: Sequence[ObservedTable],
    proofs: Sequence[BoundedProof],
    now: dt.datetime,
) -> _Judged:
    # Great Expectations makes a folder of each part of a suite's name between dots.
    name = file_name(request.subscription).replace(".", "%2E")
    _remove_generated(request.context_root.resolve() / "gx", name)
    context = get_context(mode="file", project_root_dir=str(request.context_root.resolve()))
    _remove_old_results(context, name)
    # None of these exists any more; `add_or_update` would compare each Expectation with all others, twice.
    data_source, asset, batch_definition = DATA_SOURCE
    definition = ValidationDefinition(
        name=name,
        data=context.data_sources.get(data_source).get_asset(asset).get_batch_definition(batch_definition),
        suite=context.suites.add(build_suite(name, tables, proofs)),
    )
    checkpoint = Checkpoint(
        name=name,
        validation_definitions=[context.validation_definitions.add(definition)],
        actions=[UpdateDataDocsAction(name="data_docs")],
        result_format="COMPLETE",
    )
    outcome = context.checkpoints.add(checkpoint).run(
        batch_parameters={"dataframe": comparison_frame(tables, proofs, now)},
        # An LSN's slash would make a folder.
        run_id=RunIdentifier(run_name=f"{name}__{request.fence.lsn.file_name}", run_time=now),
    )
    ((identifier, result),) = outcome.run_results.items()
    return _Judged(
        checks=dict(_to_check(check_result) for check_result in result.results),
        data_docs=_local_page(context, None),
        run_page=_local_page(context, identifier),
    )


def _local_page(context: FileDataContext, identifier: ValidationResultIdentifier | None) -> Path:
    (site,) = context.get_docs_sites_urls(resource_identifier=identifier)
    return Path(urllib.parse.unquote(urllib.parse.urlsplit(site["site_url"]).path))


KINDS: Final = {expectation.expectation_type: kind for kind, expectation in EXPECTATIONS.items()} | {
    ExpectProofToBeRecent.expectation_type: CheckKind.PROOF_AGE
}
"""The check of an Expectation's type."""


def _to_check(result: ExpectationValidationResult) -> tuple[tuple[str, CheckKind], Check]:
    """A result of Great Expectations as our check, by relation and kind.

    If an Expectation raised, `success` is False and there is no result: an error, not a difference.
    """
    configuration = result.expectation_config
    kind = KINDS[configuration.type]
    error = exception_message(result.exception_info)
    check = Check(
        kind=kind,
        success=bool(result.success) and error is None,
        observed=str(result.result.get("observed_value", "")),
        informational=configuration.severity == "info" and error is None,
        error=error,
    )
    return (configuration.kwargs["relation"], kind), check


def _table_verdict(table: ObservedTable, checks: Mapping[tuple[str, CheckKind], Check]) -> TableVerdict:
    name, full, observed = table.validated.table.table.name, table.validated.full, table.observed
    published = table.validated.table.filters
    filters = None if published is None else tuple(row_filter.sql for row_filter in published)
    age = checks.get((table.relation, CheckKind.PROOF_AGE))
    verdict = TableVerdict(
        name,
        full,
        checks=() if age is None else (age,),
        method="not compared",
        notes=_notes(table),
        filters=filters,
        chosen_buckets=table.chosen_buckets,
        compared_buckets=0,
        bytes=table.bytes,
        seconds=table.seconds,
        proof=table.proof,
    )
    if isinstance(observed, NotCompared):
        return dataclasses.replace(verdict, error=observed.reason, is_broken=observed.is_error)
    made = tuple(
        checks.get((table.relation, kind)) or Check(kind, success=False, observed="", error="no result")
        for kind in table.checks()
    )
    verdict = dataclasses.replace(
        verdict,
        checks=(*made, *verdict.checks),
        method=_method(observed),
        publisher_rows=observed.publisher_rows,
        subscriber_rows=observed.subscriber_rows,
        counts=tuple((kind, count) for kind, count in observed.differences.counts.items() if count),
        counts_exact=observed.differences.exact,
        differences=observed.differences.first,
        duplicate_keys=() if observed.duplicates is None else observed.duplicates.first,
        outside_filter=() if observed.outside is None else observed.outside.first,
        columns=observed.columns,
        compared_buckets=len(observed.chosen),
    )
    # A check that raised has judged nothing: what the digests say is no proof without it.
    if verdict.has_error:
        return dataclasses.replace(verdict, proof=table.proof_before)
    return dataclasses.replace(verdict, evidence=table.evidence)


def _left_out(
    table: LeftTable, selection: Selection, checks: Mapping[tuple[str, CheckKind], Check]
) -> LeftOut:
    chosen = {chosen.name: len(chosen.buckets) for chosen in selection.chosen}
    age = checks.get((escaped(table.name), CheckKind.PROOF_AGE))
    return LeftOut(table.name, table.reason, table.proof, age, owed=chosen.get(table.name, 0))


def _method(observed: Comparison) -> str:
    unequal = sum(not bucket.is_equal for bucket in observed.buckets)
    columns = f"{len(observed.columns)} column" + ("" if len(observed.columns) == 1 else "s")
    by = f"the key ({', '.join(observed.key)})" if observed.key else "the whole row, there is no key"
    listed = f"; the rows of {unequal} unequal buckets were compared one by one" if unequal else ""
    count = len(observed.chosen)
    buckets = f"{BUCKETS} buckets" if count == BUCKETS else f"{count} of {BUCKETS} buckets"
    return f"digests of {columns} in {buckets} by {by}, computed by both servers{listed}"


def _notes(table: ObservedTable) -> tuple[str, ...]:
    validated, observed = table.validated, table.observed
    notes = []
    if not validated.full:
        notes.append(f"for information only: {validated.note}")
    if validated.notice:
        notes.append(validated.notice)
    if isinstance(observed, Comparison):
        if table.chosen_buckets > len(observed.chosen):
            notes.append(
                f"not reached within the budget: {table.chosen_buckets - len(observed.chosen)} of"
                f" {table.chosen_buckets} chosen buckets, which the next run compares first"
            )
        if observed.outside is not None and observed.outside.unknown is not None:
            notes.append(f"the subscriber cannot evaluate the row filter: {observed.outside.unknown}")
        if not observed.differences.exact:
            notes.append("not all unequal buckets were listed: there are more differences than counted")
    return tuple(notes)
