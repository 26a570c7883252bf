"""The pipeline in Airflow: DAGs, task groups, operators, sensors and hooks for anybody's DAG file.

    from cdc_replay.airflow import ReplayTaskGroup

Parsing a DAG file is a hot path: a name is imported when it is used, and nothing here imports Spark, Arrow,
psycopg or Great Expectations at module level. Operators import `cdc_replay.commands` when they execute.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cdc_replay.airflow.alarm_notifiers import AlarmNotifier, ResolvedNotifier
    from cdc_replay.airflow.assets import change_log, commits, subscription
    from cdc_replay.airflow.dags.in_process import CaptureDag, ResumeDag, ValidateDag
    from cdc_replay.airflow.dags.spark import BackfillDag, RefreshDag, ReplayDag, SnapshotDag
    from cdc_replay.airflow.dags.watch import WatchDag, followed_groups
    from cdc_replay.airflow.hooks import PublisherHook, SubscriberHook
    from cdc_replay.airflow.operators.in_process import (
        CaptureOperator,
        EmitAssetEventOperator,
        PlanBackfillOperator,
        ResumeOperator,
        SetupOperator,
        ValidateOperator,
        WatchOperator,
    )
    from cdc_replay.airflow.operators.report import ReportOperator
    from cdc_replay.airflow.operators.spark import (
        BackfillOperator,
        RefreshOperator,
        ReplayOperator,
        SnapshotOperator,
    )
    from cdc_replay.airflow.replay_tasks import ReplayTaskGroup
    from cdc_replay.airflow.sensors import CaughtUpSensor, LagSensor, ProofSensor
    from cdc_replay.config import load_config

__all__ = [
    "AlarmNotifier",
    "BackfillDag",
    "BackfillOperator",
    "CaptureDag",
    "CaptureOperator",
    "CaughtUpSensor",
    "EmitAssetEventOperator",
    "LagSensor",
    "PlanBackfillOperator",
    "ProofSensor",
    "PublisherHook",
    "RefreshDag",
    "RefreshOperator",
    "ReplayDag",
    "ReplayOperator",
    "ReplayTaskGroup",
    "ReportOperator",
    "ResolvedNotifier",
    "ResumeDag",
    "ResumeOperator",
    "SetupOperator",
    "SnapshotDag",
    "SnapshotOperator",
    "SubscriberHook",
    "ValidateDag",
    "ValidateOperator",
    "WatchDag",
    "WatchOperator",
    "change_log",
    "commits",
    "followed_groups",
    "load_config",
    "subscription",
]

_MODULES: Final = {
    "cdc_replay.airflow.alarm_notifiers": ("AlarmNotifier", "ResolvedNotifier"),
    "cdc_replay.airflow.assets": ("change_log", "commits", "subscription"),
    "cdc_replay.airflow.dags.in_process": ("CaptureDag", "ResumeDag", "ValidateDag"),
    "cdc_replay.airflow.dags.spark": ("BackfillDag", "RefreshDag", "ReplayDag", "SnapshotDag"),
    "cdc_replay.airflow.dags.watch": ("WatchDag", "followed_groups"),
    "cdc_replay.airflow.hooks": ("PublisherHook", "SubscriberHook"),
    "cdc_replay.airflow.operators.in_process": (
        "CaptureOperator", "EmitAssetEventOperator", "PlanBackfillOperator", "ResumeOperator",
        "SetupOperator", "ValidateOperator", "WatchOperator",
    ),
    "cdc_replay.airflow.operators.report": ("ReportOperator",),
    "cdc_replay.airflow.operators.spark": (
        "BackfillOperator", "RefreshOperator", "ReplayOperator", "SnapshotOperator",
    ),
    "cdc_replay.airflow.replay_tasks": ("ReplayTaskGroup",),
    "cdc_replay.airflow.sensors": ("CaughtUpSensor", "LagSensor", "ProofSensor"),
    "cdc_replay.config": ("load_config",),
}  # fmt: skip

_MODULE_OF: Final = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    try:
        module = _MODULE_OF[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(importlib.import_module(module), name)
