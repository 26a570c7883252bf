"""DAGs whose tasks run without Spark."""

from __future__ import annotations

from typing import Any

from cdc_replay.airflow import assets
from cdc_replay.airflow.dag_docs import publisher_doc
from cdc_replay.airflow.dag_ids import capture_dag, validate_dag
from cdc_replay.airflow.dags.pipeline import PipelineDag, SubscriptionDag
from cdc_replay.airflow.operators.in_process import (
    CaptureOperator,
    ResumeOperator,
    SetupOperator,
    ValidateOperator,
)
from cdc_replay.airflow.params import capture_params, resume_params, validate_params
from cdc_replay.airflow.schedules import capture_schedule, event_intervals
from cdc_replay.airflow.task_arguments import FOLLOWING_ARGS, in_pool
from cdc_replay.config import Config, load_config


class CaptureDag(PipelineDag):
    """Set up the slot of a publisher if it is missing, then pull its changes into the change log."""

    def __init__(self, publisher: str, *, config: Config | None = None, **kwargs: Any) -> None:
        config = config or load_config()
        text = (
            f"Set up the slot of publisher `{publisher}` if it is missing, then pull its changes into the"
            " change log. One run at a time. A run that finds nothing new is skipped."
        )
        arguments = {
            "dag_id": capture_dag(publisher),
            "description": f"Slot of {publisher} → change log",
            "doc_md": publisher_doc(text, config.publisher(publisher)),
            "schedule": capture_schedule(publisher),
            "params": capture_params(),
        }
        task_arguments = FOLLOWING_ARGS | in_pool(config.publisher(publisher).pool)
        super().__init__(config, publisher, ("capture", ""), task_arguments, arguments | kwargs)
        with self:
            on_events = event_intervals() is not None
            capture = CaptureOperator(
                task_id="capture",
                publisher=publisher,
                to_lsn="{{ params.to_lsn or '' }}",
                sets_up=on_events,
            )
            if not on_events:
                SetupOperator(task_id="setup", publisher=publisher) >> capture


class ValidateDag(SubscriptionDag):
    """Prove with Great Expectations that a subscriber is consistent, after each write to it."""

    def __init__(self, subscription: str, *, config: Config | None = None, **kwargs: Any) -> None:
        config = config or load_config()
        text = (
            f"Prove with Great Expectations that the subscriber of `{subscription}` is consistent: both sides"
            " are compared at one LSN, under live writes. Runs after each write to the subscriber, and"
            " compares what is due by the configuration's `validation`: without it, everything. The link"
            " *Validation report* of the task leads to the report of its run. With *Repair*, rows that differ"
            " are written as they are published, and the proof is made again; *Dry run*, which is on, only"
            " counts them."
        )
        arguments = {
            "dag_id": validate_dag(subscription),
            "description": f"Is {subscription} what its publications say?",
            "schedule": [assets.subscription(subscription)],
            "params": validate_params(),
        }
        super().__init__(config, "validate", subscription, text, arguments | kwargs)
        with self:
            ValidateOperator(
                task_id="validate",
                subscription=subscription,
                tables="{{ params.tables | tojson }}",
                due="{{ params.due }}",
                sample="{{ params.sample or '' }}",
                max_seconds="{{ params.max_seconds or '' }}",
                max_bytes="{{ params.max_bytes or '' }}",
                repair="{{ params.repair }}",
                is_dry_run="{{ params.dry_run }}",
                refuse_unknown_params=True,
            )


class ResumeDag(SubscriptionDag):
    """Let a parked subscription or table be replayed again, with or without what parked it."""

    def __init__(self, subscription: str, *, config: Config | None = None, **kwargs: Any) -> None:
        config = config or load_config()
        text = (
            f"Let `{subscription}`, which is parked, or parked tables of it, be replayed again: with the"
            " transaction before which they are parked, without it (*Skip*), or with NULL for values that"
            " exist nowhere (*Accept NULL*). A skipped transaction is lost for good. Nothing is applied"
            " here: the next replay does that."
        )
        arguments = {
            "dag_id": f"resume__{subscription}",
            "description": f"Replay parked parts of {subscription} again",
            "params": resume_params(),
        }
        super().__init__(config, "resume", subscription, text, arguments | kwargs)
        with self:
            ResumeOperator(
                task_id="resume",
                subscription=subscription,
                tables="{{ params.tables | tojson }}",
                skip="{{ params.skip or '' }}",
                accept_null="{{ params.accept_null }}",
                refuse_unknown_params=True,
            )
