"""The DAG of each object; a user who may read the DAG may read the object's state."""

from __future__ import annotations


def capture_dag(publisher: str) -> str:
    """The DAG that captures a publisher."""
    return f"capture__{publisher}"


def replay_dag(group: str) -> str:
    """The DAG that replays a group of subscriptions."""
    return f"replay__{group}"


def validate_dag(subscription: str) -> str:
    """The DAG that validates a subscription."""
    return f"validate__{subscription}"
