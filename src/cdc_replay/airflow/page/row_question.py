"""Answers `why` for the page: the text that a terminal shows, without values of rows.

The answer tells of rows that a row filter keeps from the subscriber too, so it needs more than the right to
read: that to validate. One question at a time is answered by a process, within a bounded time per statement,
and in all.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import threading
from typing import Annotated, Final

from fastapi import HTTPException
from pydantic import BaseModel, Field, StringConstraints

from cdc_replay.airflow.connections import airflow_config
from cdc_replay.errors import CdcReplayError
from cdc_replay.model.relation import QualifiedName

STATEMENT_SECONDS: Final = 30
ANSWER_SECONDS: Final = 300
"""A server that does not keep to the first is cut off after these."""
LONGEST: Final = 1000
WIDTH: Final = 110
"""Characters of a line."""

_busy = threading.Lock()


class RowQuestion(BaseModel):
    """A table as schema.table, and its row's key as `why` takes it: COLUMN=VALUE, or the values in order."""

    table: Annotated[str, StringConstraints(min_length=3, max_length=LONGEST)]
    key: Annotated[
        list[Annotated[str, StringConstraints(max_length=LONGEST)]], Field(min_length=1, max_length=32)
    ]


def answer(subscription: str, question: RowQuestion) -> dict[str, str]:
    """The history of the row, as `text`.

    Raises:
        HTTPException: 503 if another question is being answered, 422 with the reason if it has no answer.
    """
    # Imported here: the plugin is loaded by processes that never ask a server.
    import psycopg

    from cdc_replay.commands.why import why
    from cdc_replay.postgres.connection import connections_end_after
    from cdc_replay.terminal.why_view import explained_text

    if not _busy.acquire(blocking=False):
        raise HTTPException(503, "another row is being explained; ask again in a moment")
    try:
        config = airflow_config()
        limit = dt.timedelta(seconds=STATEMENT_SECONDS)
        timeouts = dataclasses.replace(
            config.timeouts, connect=config.timeouts.page, lock=config.timeouts.page, statement=limit
        )
        bounded = dataclasses.replace(config, timeouts=timeouts)
        with connections_end_after(ANSWER_SECONDS):
            result = why(bounded, subscription, QualifiedName.parse(question.table), question.key)
        return {"text": explained_text(result, WIDTH)}
    except (CdcReplayError, psycopg.Error) as error:
        raise HTTPException(422, str(error)) from error
    finally:
        _busy.release()
