"""The errors that users see: what happened, to which object, and what to do about it.

Every error that this package raises on purpose is a `CdcReplayError`. As in PostgreSQL it has a message
(lower case, object quoted, no full stop), an optional detail, and an optional hint with the remedy; in
addition, the rule of `docs/semantics.md` that it enforces. The class determines whether a retry can help.

Errors are kept, and cross processes, as texts, of which later only the hint may be wanted. But messages and
names are a server's, and may have any line: so a part begins where a line does, and every further line of a
part is indented, as in PostgreSQL's log.

    message [rule]
        a line of the message, even if it is HINT: …
    DETAIL: …
    HINT: …
"""

from __future__ import annotations

import enum
from typing import ClassVar, Final

LONGEST: Final = 20_000
"""Characters of a message, detail or hint. A server may say a gigabyte, in the words of a table's owner, and
an error is logged, kept and shown again and again."""

_INDENT: Final = "\n    "


class Retry(enum.Enum):
    """Whether running the same command again can help."""

    NEVER = "never"
    """Something has to be changed first."""
    LATER = "later"
    """The cause is transient: a server that restarts, a lock, a busy slot."""


class CdcReplayError(Exception):
    """Base of all errors of this package."""

    retry: ClassVar[Retry] = Retry.NEVER

    def __init__(
        self,
        message: str,
        *,
        detail: str | None = None,
        hint: str | None = None,
        rule: str | None = None,
        table: tuple[str, str] | None = None,
    ) -> None:
        self.message = bounded(message)
        super().__init__(self.message)
        self.detail = None if detail is None else bounded(detail)
        self.hint = None if hint is None else bounded(hint)
        self.rule = rule
        self.table = table
        """Schema and name of the subscriber's table, if the error concerns one."""

    def __str__(self) -> str:
        message = self.message if self.rule is None else f"{self.message} [{self.rule}]"
        return join_parts(message, self.detail, self.hint)


def join_parts(message: str, detail: str | None = None, hint: str | None = None) -> str:
    """A text of which `split_parts` makes the same parts, whatever lines they have."""
    parts = [message]
    if detail:
        parts.append(f"DETAIL: {detail}")
    if hint:
        parts.append(f"HINT: {hint}")
    return "\n".join(_INDENT.join(part.splitlines()) for part in parts)


def split_parts(text: str) -> tuple[str, str, str]:
    """The message, detail and hint of the text of an error; those that it lacks are empty.

    Of texts of earlier versions, whose lines are not indented, the last hint is the error's own; one after
    two blanks is a server's, and remains in the part before.
    """
    before, mark, hint = text.rpartition("\nHINT: ")
    if not mark or hint.startswith(" "):
        before, hint = text, ""
    message, _, detail = before.partition("\nDETAIL: ")
    return message.replace(_INDENT, "\n"), detail.replace(_INDENT, "\n"), hint.replace(_INDENT, "\n")


def text_of_error(error: Exception) -> str:
    """The text of any error to be kept or shown; one that is not ours is only a message."""
    return str(error) if isinstance(error, CdcReplayError) else join_parts(bounded(str(error).strip()))


def bounded(text: str) -> str:
    """The text, without what is beyond `LONGEST`."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def retry_of(error: Exception) -> Retry:
    """The retry policy of the error's class; errors of other packages can be retried."""
    return error.retry if isinstance(error, CdcReplayError) else Retry.LATER


class InvalidConfiguration(CdcReplayError):
    """The configuration cannot be used as it is."""


class StatementNotAllowed(InvalidConfiguration):
    """A proposed script has something else than statements about publications."""


class InvalidLsn(CdcReplayError):
    """A text is not a WAL position."""


class ServerUnavailable(CdcReplayError):
    """A PostgreSQL server cannot be reached, or the connection to it was lost."""

    retry = Retry.LATER


class MissingPrivilege(CdcReplayError):
    """The role lacks a privilege that the command needs."""


class ServerProgramsMissing(CdcReplayError):
    """The programs of a PostgreSQL server of a major version are not installed on this machine."""


class ThrowawayServerFailed(CdcReplayError):
    """A server that is needed for one command only cannot be created or started, or has ended."""


class PublisherNotReady(CdcReplayError):
    """The publisher's settings or objects do not allow logical replication."""


class PublicationMissing(CdcReplayError):
    """A publication that a subscription names does not exist."""


class PublicationRefused(CdcReplayError):
    """PostgreSQL itself refuses to decode for this combination of publications."""


class SlotMissing(CdcReplayError):
    """The replication slot does not exist."""


class SlotActive(CdcReplayError):
    """Another process holds the replication slot."""

    retry = Retry.LATER


class SlotLost(CdcReplayError):
    """The replication slot cannot serve the changes that the log still needs."""


class SlotDroppedOverLimit(SlotLost):
    """The slot retained more WAL than the configuration allows, and was dropped."""


class DecodingFailed(CdcReplayError):
    """The server cannot decode the next changes of the replication slot."""


class InvalidMessage(CdcReplayError):
    """Bytes of a server that are not well-formed: a pgoutput message, or rows of another form."""


class ChangeLogMissing(CdcReplayError):
    """There is no change log at the configured location."""


class ChangeLogConflict(CdcReplayError):
    """Another writer has committed to the change log since it was opened."""

    retry = Retry.LATER


class ChangeLogNotWritable(CdcReplayError):
    """A file of the change log, or a temporary file of a capture, cannot be written."""

    retry = Retry.LATER


class ChangeLogUnavailable(CdcReplayError):
    """The folder or the object store of the change log cannot be reached, or reading it is denied."""

    retry = Retry.LATER


class ChangeLogDamaged(CdcReplayError):
    """The change log is missing data that was written to it, or holds other data."""


class ChangeLogPruned(CdcReplayError):
    """The requested changes were in the change log and have been pruned."""


class PruneLimitUnknown(CdcReplayError):
    """It cannot be determined what a subscription still needs of the change log."""

    retry = Retry.LATER


class ChangeLogMismatch(CdcReplayError):
    """The change log belongs to another cluster, database, timeline or slot."""


class SubscriberNotReady(CdcReplayError):
    """The subscriber lacks tables or columns, or its tables cannot receive the changes."""


class AnotherPublisher(SubscriberNotReady):
    """The subscriber's rows come from another database than the change log of the configuration."""


class TargetMismatch(SubscriberNotReady):
    """Published changes do not fit the subscriber's tables: a table or column is missing or unsuitable."""


class SubscriberNotWritable(CdcReplayError):
    """The subscriber answers but accepts no changes now: it is read-only, or its disk is full."""

    retry = Retry.LATER


class SubscriberLocked(CdcReplayError):
    """Other sessions of the subscriber hold the locks, or won a deadlock or serialization conflict."""

    retry = Retry.LATER


class SubscriptionInUse(CdcReplayError):
    """Another process is working on the subscription."""

    retry = Retry.LATER


class SubscriptionParked(CdcReplayError):
    """The subscription is parked (PostgreSQL: disabled) until its cause is resolved.

    `commit_lsn` is the commit LSN of the transaction that it is parked before, if there is one.
    """

    commit_lsn: int | None = None


class ReplayFailed(CdcReplayError):
    """The last replay of a subscription failed, and the subscription is not parked.

    Not retried: only another replay changes the recorded result.
    """


class NotParked(CdcReplayError):
    """The subscription or table to resume is not parked, or not before the transaction to skip."""


class ApplyConflict(CdcReplayError):
    """A change cannot be applied to the subscriber and the policy is `error`."""


class UnchangedToastLost(CdcReplayError):
    """A row enters the subscription with a value that was not sent, and that no longer exists anywhere.

    `commit_lsn` is the commit LSN of the first such transaction, if it is known.
    """

    commit_lsn: int | None = None


class InvalidFilter(CdcReplayError):
    """A stored row filter cannot be read, or evaluating it failed."""


class ReconcileRefused(CdcReplayError):
    """A reconciliation could change rows that are not the subscription's."""


class NativeSubscriptionFailed(CdcReplayError):
    """A native subscription, which ours is compared with, cannot be created or makes no progress."""


class NotConfirmed(CdcReplayError):
    """The user did not confirm."""


class NotConsistent(CdcReplayError):
    """The subscriber's rows are not those that the publications define."""


class NotValidated(CdcReplayError):
    """Whether the subscriber is consistent could not be judged."""

    retry = Retry.LATER


class AlarmsNotRemembered(CdcReplayError):
    """What was told of alarms cannot be read or written; nothing is told, as it would be told again."""

    retry = Retry.LATER


class ChannelFailed(CdcReplayError):
    """A channel of alarms did not take a notice; the next look tries again."""

    retry = Retry.LATER


class ProofTooOld(CdcReplayError):
    """The last proof of a table is older than the configuration allows."""
