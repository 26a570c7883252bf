"""The net change per subscriber row of a window."""

from cdc_replay.compact.lineage import Survey, fold_rules, lacks_values, net_changes, survey
from cdc_replay.compact.refold import contingent_changes
from cdc_replay.compact.runs import FoldRules
from cdc_replay.compact.upsert import repaired, upserted

__all__ = [
    "FoldRules",
    "Survey",
    "contingent_changes",
    "fold_rules",
    "lacks_values",
    "net_changes",
    "repaired",
    "survey",
    "upserted",
]
