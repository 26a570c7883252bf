"""The subscription option `origin` (R8.18-R8.20)."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F

from cdc_replay.model.subscription import OriginPolicy


def origin_is_wanted(policy: OriginPolicy) -> Column:
    """Whether a change is sent: with `origin = none` only one without an origin (R8.19).

    Its column says so for its own record and for the commit record: capture has compared the two (R8.20).
    """
    match policy:
        case OriginPolicy.ANY:
            return F.lit(True)
        case OriginPolicy.NONE:
            return F.col("origin").isNull()
