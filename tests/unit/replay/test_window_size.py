"""How the job of a window is divided, by its size, the groups and the cores."""

from __future__ import annotations

import pytest

from cdc_replay.replay.window_size import BYTES_PER_PART, ROWS_PER_PART, WindowSize
from cdc_replay.spark.session import SMALL_WINDOW_ROWS


@pytest.mark.parametrize(
    ("rows", "size_bytes", "parts"),
    [
        (0, 0, 1),
        (SMALL_WINDOW_ROWS - 1, BYTES_PER_PART - 1, 1),
        (SMALL_WINDOW_ROWS, 0, 4),
        (10, BYTES_PER_PART, 4),
        (10, 9 * BYTES_PER_PART + 1, 10),
        (9 * ROWS_PER_PART + 1, 0, 10),
    ],
)
def test_a_group_has_a_part_per_core_or_more_unless_the_window_is_small(
    rows: int, size_bytes: int, parts: int
) -> None:
    assert WindowSize(rows, size_bytes, cores=4).parts_per_group() == parts


@pytest.mark.parametrize(
    ("groups", "size_bytes", "tasks"),
    [
        (1, BYTES_PER_PART - 1, 1),
        (2, BYTES_PER_PART - 1, 2),
        (4, BYTES_PER_PART // 2 - 1, 2),
        (4, BYTES_PER_PART // 2, 0),
        (6, BYTES_PER_PART // 3 + 1, 0),
        (1, BYTES_PER_PART, 0),
    ],
)
def test_a_small_window_has_no_shuffle_if_a_task_can_keep_the_changes_of_its_groups(
    groups: int, size_bytes: int, tasks: int
) -> None:
    assert WindowSize(10, size_bytes, cores=2).whole_tasks(groups) == tasks


def test_a_window_of_many_changes_has_a_shuffle_however_few_their_bytes() -> None:
    assert WindowSize(SMALL_WINDOW_ROWS, 0, cores=2).whole_tasks(groups=1) == 0


@pytest.mark.parametrize(
    ("groups", "cores", "size_bytes", "tasks"),
    [
        (8, 2, 86 << 20, 2),
        (9, 2, 86 << 20, 2),
        (7, 2, 86 << 20, 0),  # fewer than four for each task
        (8, 4, 86 << 20, 0),
        (32, 8, 86 << 20, 8),
        (8, 2, (128 << 20) - 1, 2),
        (8, 2, 128 << 20, 0),  # more than a task may keep
    ],
)
def test_a_window_of_many_changes_has_no_shuffle_for_many_groups(
    groups: int, cores: int, size_bytes: int, tasks: int
) -> None:
    assert WindowSize(450_000, size_bytes, cores).whole_tasks(groups) == tasks


@pytest.mark.parametrize(
    ("groups", "subscriptions", "tasks"),
    [
        (1, 1, 20),  # a task for each part
        (2, 2, 10),
        (1, 8, 7),  # no more than three parts per task, which are kept until each subscription has them
        (8, 8, 3),
        (32, 32, 1),
        (32, 64, 7),
    ],
)
def test_parts_share_tasks_where_these_connect_to_many_subscribers(
    groups: int, subscriptions: int, tasks: int
) -> None:
    size = WindowSize(20 * ROWS_PER_PART, 0, cores=2)
    assert size.parts_per_group() == 20
    assert size.tasks_per_group(groups, subscriptions) == tasks


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 8])
def test_the_groups_of_a_window_keep_all_cores_busy(groups: int) -> None:
    size = WindowSize(SMALL_WINDOW_ROWS, 0, cores=8)
    assert groups * size.tasks_per_group(groups, subscriptions=100) >= 8
