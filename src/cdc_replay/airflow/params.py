"""The Params of the DAGs that a person starts, and their options on the command line of a Spark job.

Airflow checks a Param against its JSON schema before it creates the run, in the form as well as in the REST
API: an invalid value is answered with 400 and the reason, and no run is created. The command checks what a
schema cannot express (an end before its start, a table that no publication has) before it writes anything.

The target database of a backfill is given by the id of an Airflow connection, never by a DSN: Airflow stores
and shows Params.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from airflow.sdk.definitions.param import Param, ParamsDict

from cdc_replay.airflow.links import status_page
from cdc_replay.airflow.template_values import TABLE

_LSN: Final = r"[0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8}"
_DATE: Final = r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
_TIME: Final = r"([01]\d|2[0-3]):[0-5]\d(:[0-5]\d(\.\d{1,6})?)?"
_ZONE: Final = r"(Z|[+-]([01]\d|2[0-3])(:?[0-5]\d)?)"

LSN: Final = f"^{_LSN}$"
POSITION: Final = f"^({_LSN}|{_DATE}([T ]{_TIME}{_ZONE}?)?)$"
SHARE: Final = r"^(100(\.0{1,3})?|\d{1,2}(\.\d{1,3})?) *%$"
SIZE: Final = r"^\d{1,18} *(kB|MB|GB|TB)?$"
CONN_ID: Final = r"^[\w.-]{1,200}$"


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A run's further arguments for its Spark job, and the connections that these need."""

    arguments: tuple[str, ...] = ()
    conn_ids: frozenset[str] = frozenset()


def replay_params() -> ParamsDict:
    """`to_lsn`."""
    return ParamsDict({"to_lsn": _optional_lsn("Apply the change log up to this LSN. Empty: up to its end.")})


def capture_params() -> ParamsDict:
    """`to_lsn`."""
    return ParamsDict(
        {"to_lsn": _optional_lsn("Capture up to this LSN. Empty: the publisher's WAL position at the start.")}
    )


def snapshot_params() -> ParamsDict:
    """`tables`."""
    return ParamsDict(
        {
            "tables": _tables(
                "Copy these tables again, each as schema.table. Empty: the tables that need it."
            ),
        }
    )


def resume_params() -> ParamsDict:
    """`tables`, `skip`, `accept_null`."""
    return ParamsDict(
        {
            "tables": _tables("Resume these parked tables, each as schema.table. Empty: the subscription."),
            "skip": _optional_lsn(
                "Leave out the whole transaction that ends here; the error and the page name it. Empty: it is"
                " tried again.",
                title="Skip",
            ),
            "accept_null": _switch(
                "Accept NULL",
                "Store NULL for values of the transaction that were not sent and exist nowhere.",
                default=False,
            ),
        }
    )


def validate_params() -> ParamsDict:
    """`tables`, `due`, `sample`, `max_seconds`, `max_bytes`, `repair`, `dry_run`."""
    return ParamsDict(
        {
            "tables": _tables("Compare these tables only, each as schema.table. Empty: all that are due."),
            "due": _switch(
                "What is due",
                "Without tables: compare those that are due, with the samples and the budget of"
                " the configuration. Else all rows of all tables.",
                default=True,
            ),
            "sample": Param(
                None,
                type=["null", "string"],
                pattern=SHARE,
                title="Sample",
                description="Compare this share of each table's rows, those that were compared longest ago."
                " Empty: what the configuration says, or all.",
                examples=["5%"],
            ),
            "max_seconds": Param(
                None,
                type=["null", "number"],
                exclusiveMinimum=0,
                title="At most seconds",
                description="Compare for about so long. What is not reached comes first in the next run.",
            ),
            "max_bytes": Param(
                None,
                type=["null", "string"],
                pattern=SIZE,
                title="At most bytes",
                description="Read about so much of the publisher's tables.",
                examples=["50GB"],
            ),
            "repair": _switch(
                "Repair",
                "If rows differ, insert, update and delete rows of the subscriber until it holds"
                " what is published, then validate again.",
                default=False,
            ),
            "dry_run": _switch(
                "Dry run",
                "Of a repair: write no row, and count in the task's log what would be written.",
                default=True,
            ),
        }
    )


def refresh_params() -> ParamsDict:
    """`reconcile`, `dry_run`."""
    return ParamsDict(
        {
            "reconcile": _switch(
                "Reconcile",
                "Also make every table equal what is published: insert and update rows, and"
                " delete all rows that the publisher lacks or that the row filter excludes.",
                default=False,
            ),
            "dry_run": _switch(
                "Dry run",
                "Change nothing, and count in the task's log what would be changed.",
                default=False,
            ),
        }
    )


def backfill_params() -> ParamsDict:
    """`from`, `to`, `tables`, `into_conn_id`, `dry_run`."""
    return ParamsDict(
        {
            "from": _position(
                "From",
                "Start after this. Empty: with the first transaction of the log. What the log holds is shown"
                f' by the button "Backfill a range" of [Browse → CDC replay]({status_page()}), and by the'
                ' task "plan".',
            ),
            "to": _position(
                "To",
                "Up to and with this. Empty: what the subscriber has applied; for another database, the end"
                " of the log.",
            ),
            "tables": _tables(
                "Only these tables, each as schema.table of the subscriber. Empty: all.", section="Tables"
            ),
            "into_conn_id": Param(
                None,
                type=["null", "string"],
                pattern=CONN_ID,
                title="Another database",
                description="Airflow connection of a database to fill. Empty: repair the subscriber.",
                section="Target",
            ),
            "dry_run": _switch(
                "Dry run",
                "Only count what would be applied. The task `plan` shows the range in any case.",
                default=True,
                section="Effect",
            ),
        }
    )


def unknown_params(given: Mapping[str, Any] | None, known: Mapping[str, Any]) -> str:
    """The names in a run's configuration that are no Param, as a JSON array; empty if there are none.

    Airflow accepts and ignores them, but a run with `dry-run` in place of `dry_run` must not write.
    """
    unknown = sorted((given or {}).keys() - known.keys())
    return json.dumps(unknown) if unknown else ""


def _tables(description: str, **shown: Any) -> Param:
    return Param(
        [],
        type="array",
        items={"type": "string", "pattern": TABLE},
        uniqueItems=True,
        title="Tables",
        description=description,
        **shown,
    )


def _switch(title: str, description: str, *, default: bool, **shown: Any) -> Param:
    return Param(default=default, type="boolean", title=title, description=description, **shown)


def _position(title: str, description: str) -> Param:
    """`description` is Markdown, which Airflow's form shows of a Param that has no other description.

    What the log holds is not part of it: each new commit of the log would be a new version of the DAG.
    """
    return Param(
        None,
        type=["null", "string"],
        pattern=POSITION,
        title=title,
        description_md=f"{description} A date (2013-01-05), a time (2013-01-05T06:00:00Z; without a zone it"
        " is UTC), or an LSN (16/B374D848). A time means the last transaction that had committed by then.",
        examples=["2013-01-05", "2013-01-05T06:00:00Z", "16/B374D848"],
        section="Range",
    )


def _optional_lsn(description: str, title: str = "Up to") -> Param:
    return Param(
        None,
        type=["null", "string"],
        pattern=LSN,
        title=title,
        description=description,
        examples=["16/B374D848"],
    )
