"""The net change per subscriber row of a window."""

from cdc_replay.replay.compact.backfill import Repair, Upsert
from cdc_replay.replay.compact.fold_frames import FoldRules, Revision
from cdc_replay.replay.compact.refold import contingent_changes
from cdc_replay.replay.compact.unsent_nulls import EnteredRow, MissingValues, NullRule
from cdc_replay.replay.compact.window_facts import NO_FACTS, WindowFacts, fold_rules

__all__ = [
    "NO_FACTS",
    "EnteredRow",
    "FoldRules",
    "MissingValues",
    "NullRule",
    "Repair",
    "Revision",
    "Upsert",
    "WindowFacts",
    "contingent_changes",
    "fold_rules",
]
