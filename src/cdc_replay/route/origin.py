"""The subscription option `origin` (R8.18-R8.20)."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F

from cdc_replay.model.subscription import OriginPolicy


def origin_is_wanted(policy: OriginPolicy) -> Column:
    """Whether a change's transaction is sent: with `origin = none` only one that has no origin (R8.19b)."""
    match policy:
        case OriginPolicy.ANY:
            return F.lit(True)
        case OriginPolicy.NONE:
            return F.col("origin").isNull()
