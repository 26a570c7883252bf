"""The net change per subscriber row of a window."""

from cdc_replay.replay.compact.backfill import as_repair, as_upsert
from cdc_replay.replay.compact.fold_frames import FoldRules
from cdc_replay.replay.compact.key_lineage import WindowFacts, fold_frame, fold_rules, scan_window
from cdc_replay.replay.compact.refold import contingent_changes
from cdc_replay.replay.compact.unsent_nulls import (
    EnteredRow,
    UnsentNulls,
    has_missing_values,
    unsent_nulls,
    with_nulls,
    without_marks,
)

__all__ = [
    "EnteredRow",
    "FoldRules",
    "UnsentNulls",
    "WindowFacts",
    "as_repair",
    "as_upsert",
    "contingent_changes",
    "fold_frame",
    "fold_rules",
    "has_missing_values",
    "scan_window",
    "unsent_nulls",
    "with_nulls",
    "without_marks",
]
