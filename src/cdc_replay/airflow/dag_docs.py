"""What a DAG says about itself, from the configuration alone: parsing a DAG file asks no server.

The row filters are the publisher's, so the text says where to read them. The digest is of the part of the
configuration that the DAG is made of, without secrets: Airflow shows a change of it as a new version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from cdc_replay.config import Config, PublisherConfig, SubscriptionConfig

_DIGEST_LENGTH = 12


def publisher_doc(text: str, publisher: PublisherConfig) -> str:
    """The text with what the configuration says of a publisher."""
    facts = {"publisher": publisher.name, "slot": publisher.slot, "change log": publisher.change_log}
    return _document(text, facts | {"server": _server(publisher.conn_id)}, publisher)


def subscription_doc(text: str, config: Config, subscription: SubscriptionConfig) -> str:
    """The text with what the configuration says of a subscription."""
    settings = subscription.subscription
    facts = {
        "subscription": subscription.name,
        "publisher": settings.publisher,
        "publications": ", ".join(settings.publications),
        "subscriber": _server(subscription.conn_id),
        "on conflict": settings.on_conflict.value,
        "on failure": settings.on_failure.value,
        "Spark": config.groups[subscription.group].spark_conn_id,
    }
    filters = (
        f"The effective row filters are those of the publications now: `cdc-replay explain"
        f" {subscription.name}` shows them."
    )
    return _document(f"{text}\n\n{filters}", facts, subscription)


def replay_doc(text: str, config: Config, subscriptions: Sequence[str]) -> str:
    """The text with the subscriptions that one application replays."""
    members = tuple(config.subscription(name) for name in subscriptions)
    facts = {member.name: ", ".join(member.subscription.publications) for member in members}
    group = config.groups[members[0].group]
    text = f"{text}\n\nThe subscriptions and their publications, on Spark connection `{group.spark_conn_id}`:"
    return _document(text, facts, (group, members))


def _server(conn_id: str | None) -> str:
    return f"connection {conn_id}" if conn_id else "a DSN of the configuration file"


def _document(text: str, facts: Mapping[str, str], configured: object) -> str:
    # The representation of a configuration omits DSNs.
    digest = hashlib.sha256(repr(configured).encode()).hexdigest()[:_DIGEST_LENGTH]
    rows = (f"| {name} | `{_cell(value)}` |" for name, value in {**facts, "configuration": digest}.items())
    return "\n".join([text, "", "| | |", "| --- | --- |", *rows])


def _cell(text: str) -> str:
    """A name from the configuration, which cannot end the code span or the cell."""
    return text.replace("`", "'").replace("|", "\\|").replace("\n", " ")
