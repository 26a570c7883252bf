"""Executes the statements of a proposal in an open transaction, one message of the extended protocol each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psycopg import errors as pg
from psycopg import pq

from cdc_replay.errors import PublisherNotReady
from cdc_replay.model.proposed_change import ProposalRefused
from cdc_replay.model.publication import PublisherCatalog
from cdc_replay.postgres.connection import Connection
from cdc_replay.proposal.statements import Statement

_REFUSALS = frozenset({"0A", "21", "22", "23", "25", "2B", "34", "3D", "3F", "42", "44", "55"})
"""Classes of SQLSTATE by which PostgreSQL refuses a statement for what it says or meets."""


@dataclass(frozen=True, slots=True)
class Definitions:
    """The publisher's catalog now, and as the proposal would make it; None if PostgreSQL refuses it.

    `parsed_by` names the server that executed the statements, `because` says why it was not the publisher.
    """

    present: PublisherCatalog
    proposed: PublisherCatalog | None
    parsed_by: str
    because: str | None = None
    refusal: ProposalRefused | None = None


def execute(connection: Connection, statements: Sequence[Statement]) -> ProposalRefused | None:
    """Execute the statements in the open transaction; the refusal of the first that fails.

    Raises:
        psycopg.errors.InsufficientPrivilege, LockNotAvailable, ReadOnlySqlTransaction: if this server, or the
            role, is the reason, and not the statement.
        psycopg.Error: if the server fails.
        PublisherNotReady: if the server confirms another command than the statement's.
    """
    for statement in statements:
        # exec_params is the extended protocol, in which a message has one statement at most.
        result = connection.pgconn.exec_params(statement.text.encode(), None)
        if result.status == pq.ExecStatus.COMMAND_OK:
            _check_executed(connection, statement, result.command_status)
            continue
        error = pg.error_from_result(result)
        if _is_refusal(error):
            return ProposalRefused(
                error.diag.message_primary or str(error),
                statement.line,
                error.diag.message_detail,
                error.diag.message_hint,
            )
        raise error
    return None


def _is_refusal(error: pg.Error) -> bool:
    if isinstance(error, pg.InsufficientPrivilege | pg.LockNotAvailable | pg.ReadOnlySqlTransaction):
        return False
    return (error.sqlstate or "")[:2] in _REFUSALS


def _check_executed(connection: Connection, statement: Statement, tag: bytes | None) -> None:
    in_transaction = connection.info.transaction_status is pq.TransactionStatus.INTRANS
    if tag != statement.command.value.encode() or not in_transaction:
        raise PublisherNotReady(
            f"the server executed {(tag or b'nothing').decode()} for a {statement.command.value}",
            detail=f"The statement on line {statement.line} is {statement.text}.",
            hint="Report it. The transaction is rolled back.",
        )
