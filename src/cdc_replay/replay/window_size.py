"""How the job of a window is divided: by how much there is to read, for how many, on how many cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cdc_replay.spark.session import SMALL_WINDOW_ROWS

ROWS_PER_PART: Final = 200_000
BYTES_PER_PART: Final = 64 << 20
_MAX_PARTS_PER_TASK: Final = 3
"""Parts whose rows a task keeps, while it writes them to several subscriptions in turn."""

_GROUPS_WORTH_DECODING: Final = 4
_MOST_KEPT_BYTES: Final = 512 << 20
"""Of messages whose changes a task keeps if all groups see them; packed they are a third of it."""


@dataclass(frozen=True, slots=True)
class WindowSize:
    """The messages of a window, their bytes in memory, and the cores that are to share them."""

    rows: int
    size_bytes: int
    cores: int

    def parts_per_group(self) -> int:
        """The number of parts into which the changes of a routing group are divided."""
        if self.rows < SMALL_WINDOW_ROWS and self.size_bytes < BYTES_PER_PART:
            return 1
        return max(self.cores, -(-self.rows // ROWS_PER_PART), -(-self.size_bytes // BYTES_PER_PART))

    def whole_tasks(self, groups: int) -> int:
        """The number of tasks that do both sides for some of the groups; 0 if the window needs a shuffle.

        Such a task reads the whole window, and keeps the packed changes of its groups until it folds them. To
        pass the changes of four groups through the JVM costs more than to decode the window once per core:
        450,000 changes for eight groups take 3.3 s without a shuffle, 3.8 with one.
        """
        tasks = min(groups, self.cores)
        if groups >= _GROUPS_WORTH_DECODING * tasks:
            most = _MOST_KEPT_BYTES
        else:
            most = BYTES_PER_PART if self.parts_per_group() == 1 else 0
        return tasks if self.size_bytes * groups < most * tasks else 0

    def tasks_per_group(self, groups: int, subscriptions: int) -> int:
        """The number of tasks among which the parts of a group are divided, after a shuffle.

        Each of many groups usually sees little of the window: together they see no more than a window or two.
        A task costs as much as thousands of changes, plus a connection for each subscription of its group,
        with a COPY for each target. With many of these, no core gets more tasks than necessary.
        """
        parts = self.parts_per_group()
        tasks = max(-(-self.cores // groups), -(-max(parts, 2 * self.cores) // subscriptions))
        if subscriptions > groups:
            tasks = max(tasks, -(-parts // _MAX_PARTS_PER_TASK))
        return min(parts, tasks)
