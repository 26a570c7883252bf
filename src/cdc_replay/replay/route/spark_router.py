"""CHANGES → ROUTED, as frames.

`replay.route.group_router` routes each batch on the executors. The counts of a batch are a row of their own,
which an `Observation` sums up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F

from cdc_replay.model.frames import ROUTED
from cdc_replay.model.subscription import OriginPolicy
from cdc_replay.replay.route.group_router import GroupRouter
from cdc_replay.replay.route.route_index import DecodedChanges, RouteIndex
from cdc_replay.replay.route.router import FILTERED_OUT, ROUTED_SCHEMA, TO_DELETE, TO_INSERT
from cdc_replay.replay.route.routes import Routes
from cdc_replay.spark.nullable_lists import map_in_arrow

_COUNTS: Final = (FILTERED_OUT, TO_INSERT, TO_DELETE)
_COUNTED: Final = pa.schema([*ROUTED_SCHEMA, *((name, pa.int64()) for name in _COUNTS)])
_COUNTED_DDL: Final = ", ".join([ROUTED.ddl, *(f"{name} bigint" for name in _COUNTS)])


@dataclass(frozen=True, slots=True)
class Routed:
    """The frame, and its counts, which an action on the frame fills.

    `counts` holds `filtered_out`, `updates_to_insert` and `updates_to_delete`.
    """

    changes: DataFrame
    counts: Observation


def route(changes: DataFrame, routes: Routes, *, origin: OriginPolicy, publisher_dsn: str) -> Routed:
    """What of `changes` (CHANGES) the subscription must see (ROUTED), in the published relations' columns.

    Args:
        changes: decoded changes of the window.
        routes: from `plan_routes`; must not be empty.
        origin: the subscription's option.
        publisher_dsn: where filters are evaluated that Arrow cannot answer exactly.
    """
    index = RouteIndex.from_routes(routes.routes)
    router = GroupRouter.from_routes(routes, origin, index)

    def route_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with router.open_session(publisher_dsn) as session:
            for batch in batches:
                routed, counts = router.route(DecodedChanges.from_batch(batch, index), session)
                no_counts = [pa.nulls(routed.num_rows, pa.int64()) for _ in _COUNTS]
                yield pa.RecordBatch.from_arrays([*routed.columns, *no_counts], schema=_COUNTED)
                yield pa.RecordBatch.from_pylist([dict(counts)], schema=_COUNTED)

    counts = Observation()
    rows = map_in_arrow(changes, route_batches, _COUNTED_DDL)
    rows = rows.observe(counts, *(F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in _COUNTS))
    return Routed(rows.where(F.col("kind").isNotNull()).select(*ROUTED.names), counts)
