"""The net change per subscriber row of a window."""

from cdc_replay.compact.lineage import Survey, lacks_values, net_changes, survey
from cdc_replay.compact.upsert import repaired, upserted

__all__ = ["Survey", "lacks_values", "net_changes", "repaired", "survey", "upserted"]
