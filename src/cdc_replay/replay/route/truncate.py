"""Which relation of a TRUNCATE message reaches a subscription (R2.13).

Row filters do not matter (R3.12). A relation passes iff TRUNCATE is published for it and it is its own
published relation. The log names leaves and partitioned tables alike (R2.14), so one rule serves both: a leaf
that is published as an ancestor is never truncated alone; the ancestor is, if the message names it.
"""

from __future__ import annotations

from cdc_replay.model.publication import PublishAction
from cdc_replay.publication.resolve import PublishedRelation


def truncate_is_sent(published: PublishedRelation) -> bool:
    """Whether a TRUNCATE that names `published.leaf` goes to the subscriber."""
    return PublishAction.TRUNCATE in published.actions and published.table.id == published.leaf
