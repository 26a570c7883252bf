"""Run a validation: compare at the fence, judge by Great Expectations, write the reports.

    compare all tables   → data frame, suite        (nothing is written)
    checkpoint           → validation result, Data Docs
    page                 → uncommitted/reports/<subscription>/<run>.html, and latest.html next to it

Everything is under `<context root>/gx`, a file Data Context that is created on first use. Suites, checkpoints
and results have the subscription's name, so subscriptions do not touch each other's; the index of the Data
Docs is shared, and a file lock serializes runs. A crash leaves at most a result without its page, or a
truncated generated file; the next run generates its files again and adds a result.

No file contains row values other than keys, or a DSN.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import importlib.resources
import logging
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cdc_replay.compare.comparison import BUCKETS, Comparison, NotCompared, ValidatedTable, compare_table
from cdc_replay.compare.fence import ComparisonFence
from cdc_replay.model.progress import Report, each_table, unreported
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
from cdc_replay.validate.html_report import write_page
from cdc_replay.validate.report_context import ReportContext, file_name, reports_folder
from cdc_replay.validate.suites import EXPECTATIONS, ObservedTable, build_suite, comparison_frame
from cdc_replay.validate.verdict import Check, CheckKind, TableVerdict, Verdict

logger = logging.getLogger(__name__)

DATA_CONTEXT: Final = "great_expectations.yml"
DATA_SOURCE: Final = ("cdc_replay", "comparison_at_fence", "all_tables")
"""Data source, asset and batch definition of `great_expectations.yml`."""

GENERATED: Final = ("expectations", "validation_definitions", "checkpoints")
"""Folders of the Data Context with one file per subscription, rewritten by every run."""


@dataclass(frozen=True, slots=True)
class ValidationRequest:
    """What to validate, where to write, and what the report shows beside the verdict.

    `context_root` is the parent of `gx/`, created if missing. Per table, `listed_keys` differing keys of each
    kind are listed.
    """

    subscription: str
    fence: ComparisonFence
    tables: tuple[ValidatedTable, ...]
    context_root: Path
    context: ReportContext
    listed_keys: int = 20
    with_values: bool = False
    """Whether the report shows the values of listed rows, on both sides."""
    report: Report = unreported


@dataclass(frozen=True, slots=True)
class _Judged:
    """The results of Great Expectations: checks by (relation, kind), and its pages."""

    checks: Mapping[tuple[str, CheckKind], Check]
    data_docs: Path
    run_page: Path


def validate_subscription(request: ValidationRequest) -> Verdict:
    """Compare all tables at the fence and judge them; the verdict is also written to disk.

    Differences and errors of single tables are part of the verdict, not exceptions.

    Raises:
        ServerUnavailable: if a server is lost.
    """
    started = time.monotonic()
    now = dt.datetime.now(dt.UTC)
    tables = _observe(request)
    gx_root = _data_context(request.context_root)
    with _exclusive_lock(gx_root):
        judged = _judge(request, tables, now)
        folder = reports_folder(request.context_root, request.subscription)
        verdict = Verdict(
            subscription=request.subscription,
            lsn=request.fence.lsn,
            tables=tuple(_table_verdict(table, judged.checks) for table in tables),
            data_docs=judged.data_docs,
            report=folder / f"{request.fence.lsn.file_name}-{now:%Y%m%dT%H%M%S%fZ}.html",
            seconds=time.monotonic() - started,
            error=None if tables else "the subscription has no tables to validate",
        )
        write_page(verdict, request.context, now=now.astimezone(), run_page=judged.run_page)
    logger.info(
        "subscription %s at %s: %s, %d tables, %d fail, %.1f s, report %s",
        *(verdict.subscription, verdict.lsn, "consistent" if verdict.success else "NOT CONSISTENT"),
        *(len(verdict.tables), sum(not table.success for table in verdict.tables)),
        *(verdict.seconds, verdict.report),
    )
    return verdict


def _observe(request: ValidationRequest) -> tuple[ObservedTable, ...]:
    observed = []
    tables = each_table(
        request.report, "compare", request.subscription, request.tables, lambda table: table.table.table.name
    )
    for position, validated in enumerate(tables, start=1):
        table = ObservedTable(validated, _compare(request, validated))
        logger.info("compared %s (%d of %d)", validated.table.table.name, position, len(request.tables))
        observed.append(table)
    return tuple(observed)


def _compare(request: ValidationRequest, validated: ValidatedTable) -> Comparison | NotCompared:
    return compare_table(request.fence, validated, request.listed_keys, with_values=request.with_values)


def _data_context(context_root: Path) -> Path:
    """The folder of the Data Context, with its configuration file."""
    gx_root = context_root.resolve() / "gx"
    make_folder(gx_root)
    make_folder(gx_root / "uncommitted")
    with _exclusive_lock(gx_root):
        if not (configuration := gx_root / DATA_CONTEXT).exists():
            template = importlib.resources.files("cdc_replay.validate") / DATA_CONTEXT
            part = configuration.with_suffix(".part")
            part.write_bytes(template.read_bytes())
            part.replace(configuration)
    return gx_root


@contextlib.contextmanager
def _exclusive_lock(gx_root: Path) -> Iterator[None]:
    with (gx_root / "uncommitted" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released with the file, also when the process dies
        yield


def _remove_generated(gx_root: Path, name: str) -> None:
    # Great Expectations reads the old file before it writes a new one, and fails if a crash truncated it.
    for folder in GENERATED:
        (gx_root / folder / f"{name}.json").unlink(missing_ok=True)


def _judge(request: ValidationRequest, tables: Sequence[ObservedTable], now: dt.datetime) -> _Judged:
    name = file_name(request.subscription)
    _remove_generated(request.context_root.resolve() / "gx", name)
    context = get_context(mode="file", project_root_dir=str(request.context_root.resolve()))
    data_source, asset, batch_definition = DATA_SOURCE
    definition = ValidationDefinition(
        name=name,
        data=context.data_sources.get(data_source).get_asset(asset).get_batch_definition(batch_definition),
        suite=context.suites.add_or_update(build_suite(name, tables)),
    )
    checkpoint = Checkpoint(
        name=name,
        validation_definitions=[context.validation_definitions.add_or_update(definition)],
        actions=[UpdateDataDocsAction(name="data_docs")],
        result_format="COMPLETE",
    )
    outcome = context.checkpoints.add_or_update(checkpoint).run(
        batch_parameters={"dataframe": comparison_frame(tables)},
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


KINDS: Final = {expectation.expectation_type: kind for kind, expectation in EXPECTATIONS.items()}
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
    if isinstance(observed, NotCompared):
        return TableVerdict(
            name,
            full,
            checks=(),
            method="not compared",
            notes=_notes(table),
            error=observed.reason,
            filters=filters,
        )
    return TableVerdict(
        name=name,
        full=full,
        checks=tuple(
            checks.get((table.relation, kind)) or Check(kind, success=False, observed="", error="no result")
            for kind in table.checks()
        ),
        method=_method(observed),
        publisher_rows=observed.publisher_rows,
        subscriber_rows=observed.subscriber_rows,
        counts=tuple((kind, count) for kind, count in observed.differences.counts.items() if count),
        counts_exact=observed.differences.exact,
        differences=observed.differences.first,
        duplicate_keys=() if observed.duplicates is None else observed.duplicates.first,
        outside_filter=() if observed.outside is None else observed.outside.first,
        notes=_notes(table),
        filters=filters,
        columns=observed.columns,
    )


def _method(observed: Comparison) -> str:
    unequal = sum(not bucket.is_equal for bucket in observed.buckets)
    columns = f"{len(observed.columns)} column" + ("" if len(observed.columns) == 1 else "s")
    by = f"the key ({', '.join(observed.key)})" if observed.key else "the whole row, there is no key"
    listed = f"; the rows of {unequal} unequal buckets were compared one by one" if unequal else ""
    return f"digests of {columns} in {BUCKETS} buckets by {by}, computed by both servers{listed}"


def _notes(table: ObservedTable) -> tuple[str, ...]:
    validated, observed = table.validated, table.observed
    notes = []
    if not validated.full:
        notes.append(f"for information only: {validated.note}")
    if validated.notice:
        notes.append(validated.notice)
    if isinstance(observed, Comparison):
        if observed.outside is not None and observed.outside.unknown is not None:
            notes.append(f"the subscriber cannot evaluate the row filter: {observed.outside.unknown}")
        if not observed.differences.exact:
            notes.append("not all unequal buckets were listed: there are more differences than counted")
    return tuple(notes)
