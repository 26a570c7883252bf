"""A publisher and a subscriber with the same filtered state, and one call that validates them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from psycopg import sql

from cdc_replay.catalog.reader import read_catalog
from cdc_replay.compare.comparison import ValidatedTable
from cdc_replay.compare.fence import ComparisonFence, open_fence
from cdc_replay.model.table_state import Ready, TableState
from cdc_replay.postgres.exported_snapshot import export_snapshot
from cdc_replay.publication.resolve import SyncedTable, synced_tables
from cdc_replay.subscriber import state_schema, subscription_records, subscription_tables
from cdc_replay.subscriber.target_tables import read_target_tables
from cdc_replay.validate.report_context import ReportContext
from cdc_replay.validate.run import ValidationRequest, judge_subscription, observe_subscription
from cdc_replay.validate.selection import ChosenTable, Selection
from cdc_replay.validate.verdict import Verdict
from fixtures.postgres import ANY_DATABASE, Database

SUBSCRIPTION = "nsw"


@dataclass(frozen=True)
class Bench:
    """Both databases, the publication `p`, and the folder of the Data Context."""

    publisher: Database
    subscriber: Database
    context_root: Path
    publisher_dsn: str | None = None
    """How to reach the publisher, if not as its superuser."""
    subscriber_dsn: str | None = None
    with_values: bool = False
    """Whether the report shows values of differing rows."""

    def both(self, script: str) -> None:
        """Run a script on both sides."""
        self.publisher.run(script)
        self.subscriber.run(script)

    def synced(self) -> tuple[SyncedTable, ...]:
        with self.publisher.connect() as connection:
            return synced_tables(read_catalog(connection), ["p"])

    def copy(self) -> None:
        """The rows of the initial copy (R7.4, R7.6)."""
        for synced in self.synced():
            table = sql.Identifier(synced.table.name.schema, synced.table.name.name)
            columns = sql.SQL(", ").join(map(sql.Identifier, synced.columns))
            filters = sql.SQL(" or ").join(sql.SQL(row_filter.sql) for row_filter in synced.filters or ())
            where = sql.SQL(" where {}").format(filters) if synced.filters else sql.SQL("")
            source = sql.SQL("copy (select {} from {}{}) to stdout").format(columns, table, where)
            target = sql.SQL("copy {} ({}) from stdin").format(table, columns)
            with (
                self.publisher.connect() as here,
                self.subscriber.connect() as there,
                here.cursor().copy(source) as rows,
                there.cursor().copy(target) as sink,
            ):
                for block in rows:
                    sink.write(block)

    @contextmanager
    def fence(
        self, subscription: str = SUBSCRIPTION, *, instead: TableState | None = None
    ) -> Iterator[ComparisonFence]:
        """A fence as after a replay up to it, or with the tables in another state `instead`."""
        with export_snapshot(self.publisher_dsn or self.publisher.dsn) as snapshot:
            with self.subscriber.connect() as connection:
                state_schema.install(connection)
                subscription_records.bind_subscription(connection, subscription, "1", ["p"], ANY_DATABASE)
                for synced in self.synced():
                    reached = instead or Ready(snapshot.consistent_point)
                    subscription_tables.set_table_state(connection, subscription, synced.table.name, reached)
            with open_fence(snapshot, self.subscriber_dsn or self.subscriber.dsn, subscription) as fence:
                yield fence

    def tables(self, fence: ComparisonFence, *, note: str = "") -> tuple[ValidatedTable, ...]:
        """All tables; a note makes them tables that the subscriber need not mirror."""
        synced = self.synced()
        targets = read_target_tables(fence.subscriber, [table.table.name for table in synced])
        return tuple(
            ValidatedTable(table, targets.get(table.table.name), full=not note, note=note) for table in synced
        )

    def validate(self, *, note: str = "", subscription: str = SUBSCRIPTION) -> Verdict:
        with self.fence(subscription) as fence:
            return self.validate_at(fence, self.tables(fence, note=note), subscription)

    def validate_at(
        self, fence: ComparisonFence, tables: tuple[ValidatedTable, ...], subscription: str = SUBSCRIPTION
    ) -> Verdict:
        context = ReportContext("shop", ("p",))
        request = ValidationRequest(
            subscription,
            fence,
            Selection(tuple(map(ChosenTable, tables))),
            self.context_root,
            context,
            with_values=self.with_values,
        )
        return judge_subscription(request, observe_subscription(request))
