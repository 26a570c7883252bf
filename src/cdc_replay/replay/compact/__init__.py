"""The net change per subscriber row of a window."""

from cdc_replay.replay.compact.backfill import repaired, upserted
from cdc_replay.replay.compact.fold import FoldRules
from cdc_replay.replay.compact.key_lineage import Survey, fold_rules, net_changes, survey
from cdc_replay.replay.compact.refold import contingent_changes
from cdc_replay.replay.compact.unsent_nulls import (
    EnteredRow,
    UnsentNulls,
    lacks_values,
    unsent_nulls,
    with_nulls,
    without_marks,
)

__all__ = [
    "EnteredRow",
    "FoldRules",
    "Survey",
    "UnsentNulls",
    "contingent_changes",
    "fold_rules",
    "lacks_values",
    "net_changes",
    "repaired",
    "survey",
    "unsent_nulls",
    "upserted",
    "with_nulls",
    "without_marks",
]
