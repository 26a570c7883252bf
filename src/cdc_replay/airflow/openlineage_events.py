"""A task's flow as OpenLineage's datasets and facets.

Datasets have the names that OpenLineage gives to tables of PostgreSQL, `postgres://host:port` and
`database.schema.table`, so that other jobs of the same tables connect to them. No part of a DSN but host,
port and database is in an event, and no value of a row.

Imported by the methods of `lineage` only, because it needs the provider of OpenLineage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from airflow.providers.openlineage.extractors import OperatorLineage
from attrs import define
from openlineage.client.event_v2 import Dataset, InputDataset, OutputDataset
from openlineage.client.facet_v2 import (
    RunFacet,
    data_quality_assertions_dataset,
    output_statistics_output_dataset,
)

from cdc_replay.airflow.task_lineage import Flow, TaskLineage
from cdc_replay.config import Config
from cdc_replay.model.proof import BUCKETS
from cdc_replay.model.relation import QualifiedName
from cdc_replay.monitoring.table_lineage import (  # noqa: TID253 - no DAG file imports this module
    SubscriptionFeeds,
    address,
    published_tables,
    subscription_feeds,
)
from cdc_replay.postgres.server_address import ServerAddress

RUN_FACET: Final = "cdcReplay"

ASSERTION: Final = "subscriber_consistent"
"""The one assertion of a validation: both sides hold the same rows at one LSN."""


@define
class CdcReplayRunFacet(RunFacet):
    """The ranges of the WAL that a run captured, applied or compared: `(fromLsn, toLsn]` for each name.

    An element has `publisher` or `subscription`, `fromLsn` and `toLsn`, which may be None, and `transactions`
    where they are counted.
    """

    windows: list[dict[str, Any]]


def before(config: Config, task: TaskLineage) -> OperatorLineage[Any, Any]:
    """What is known before a task: its change log."""
    if task.flow is Flow.CAPTURE:
        return OperatorLineage(outputs=[_change_log(config, task)])
    return OperatorLineage(inputs=[_change_log(config, task)] if task.flow.reads_log else [])


def after(config: Config, task: TaskLineage) -> OperatorLineage[Any, Any]:
    """A finished task's tables, and its ranges.

    Raises:
        CdcReplayError: if a server does not answer.
    """
    lineage = before(config, task)
    if task.flow is Flow.CAPTURE:
        publisher = config.publisher(str(task.publisher))
        source = address(config, publisher)
        lineage.inputs = [
            _table(InputDataset, source, name) for name in published_tables(config, publisher.name)
        ]
    for feeds in subscription_feeds(config, _reached(task), into_conn_id=task.into_conn_id):
        inputs, outputs = _feeds(task, feeds)
        lineage.inputs += inputs
        lineage.outputs += [] if task.is_dry_run else outputs
    # Subscriptions share tables of the publisher.
    lineage.inputs = list({(dataset.namespace, dataset.name): dataset for dataset in lineage.inputs}.values())
    if windows := [_window(result) for result in task.results]:
        lineage.run_facets = {RUN_FACET: CdcReplayRunFacet(windows=windows)}
    return lineage


def _reached(task: TaskLineage) -> list[str]:
    """The task's subscriptions, without those of a group whose replay failed."""
    if task.flow is not Flow.REPLAY:
        return list(task.subscriptions)
    failed = {result.get("subscription") for result in task.results if result.get("error")}
    return [name for name in task.subscriptions if name not in failed]


def _feeds(task: TaskLineage, feeds: SubscriptionFeeds) -> tuple[list[InputDataset], list[OutputDataset]]:
    if task.flow is Flow.VALIDATE:
        return list(_validated(task, feeds)), []
    copied = {table["table"]: table for result in task.results for table in _copied(result)}
    tables = [feed for feed in feeds.tables if task.flow is not Flow.COPY or str(feed.published) in copied]
    return (
        [_table(InputDataset, feeds.publisher, feed.published) for feed in tables],
        [
            _table(
                OutputDataset, feeds.subscriber, feed.target,
                outputFacets=_statistics(copied.get(str(feed.published))),
            )
            for feed in tables
        ],
    )  # fmt: skip


def _is_decided(table: Mapping[str, Any]) -> bool:
    """Whether a validation has said something of the table as a whole: a sample that is equal has not."""
    is_whole = table.get("compared_buckets", BUCKETS) == BUCKETS
    return not table.get("has_error") and (is_whole or not table["success"])


def _validated(task: TaskLineage, feeds: SubscriptionFeeds) -> Iterator[InputDataset]:
    successes = {
        table["table"]: table["success"]
        for result in task.results
        for table in result["tables"]
        if _is_decided(table)
    }
    for feed in feeds.tables:
        yield _table(InputDataset, feeds.publisher, feed.published)
        is_consistent = successes.get(str(feed.target), successes.get(str(feed.published)))
        facets = {} if is_consistent is None else {"dataQualityAssertions": _assertion(is_consistent)}
        yield _table(InputDataset, feeds.subscriber, feed.target, inputFacets=facets)


def _assertion(is_consistent: bool) -> data_quality_assertions_dataset.DataQualityAssertionsDatasetFacet:
    return data_quality_assertions_dataset.DataQualityAssertionsDatasetFacet(
        assertions=[data_quality_assertions_dataset.Assertion(assertion=ASSERTION, success=is_consistent)]
    )


def _copied(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The tables that a snapshot copied, or a refresh by its snapshot."""
    snapshot = result.get("snapshot") or result
    return [table for table in snapshot.get("tables", ()) if "rows" in table]


def _statistics(
    copied: Mapping[str, Any] | None,
) -> dict[str, output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet]:
    if copied is None:
        return {}
    return {
        "outputStatistics": output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(
            rowCount=copied["rows"], size=copied["bytes"]
        )
    }


def _table(
    kind: type[InputDataset] | type[OutputDataset],
    server: ServerAddress,
    table: QualifiedName,
    **facets: Any,
) -> Any:  # noqa: ANN401 - of `kind`
    host = f"[{server.host}]" if ":" in server.host else server.host
    return kind(
        namespace=f"postgres://{host}:{server.port}",
        name=f"{server.database}.{table.schema}.{table.name}",
        **facets,
    )


def _change_log(config: Config, task: TaskLineage) -> Dataset:
    publisher = task.publisher or config.subscription(task.subscriptions[0]).subscription.publisher
    log = config.publisher(publisher).change_log
    kind = OutputDataset if task.flow is Flow.CAPTURE else InputDataset
    scheme, separator, _ = log.partition("://")
    if not separator or scheme == "file":
        return kind(namespace="file", name=urlsplit(log).path if separator else log)
    store = urlsplit(log)
    return kind(namespace=f"{scheme}://{store.netloc.rpartition('@')[2]}", name=store.path.strip("/"))


def _window(result: Mapping[str, Any]) -> dict[str, Any]:
    name = "publisher" if "publisher" in result else "subscription"
    transactions = {"transactions": result["transactions"]} if "transactions" in result else {}
    return {name: result[name], "fromLsn": result["from_lsn"], "toLsn": result["to_lsn"]} | transactions
