"""Writes the references of keys, commands and metrics from the code: `python tools/reference_pages.py`.

| page                    | section        | generated from                                |
|-------------------------|----------------|-----------------------------------------------|
| `docs/configuration.md` | `## Keys`      | the models in `cdc_replay.config_schema`      |
| `docs/commands.md`      | `## Reference` | the options and docstrings of `cdc_replay.cli` |
| `docs/metrics.md`       | `## Gauges`    | `cdc_replay.airflow.gauges`                   |

The other sections of these pages are written by hand.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import typer
from pydantic import BaseModel

from cdc_replay import config_schema
from cdc_replay.airflow.gauges import GAUGES, PREFIX, Gauge
from cdc_replay.cli import app
from cdc_replay.config import Timeouts

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"
CONFIGURATION: Final = DOCS / "configuration.md"
COMMANDS: Final = DOCS / "commands.md"
METRICS: Final = DOCS / "metrics.md"

MODELS: Final[Mapping[str, type[BaseModel]]] = {
    "publishers.NAME": config_schema.Publisher,
    "publishers.NAME.alarms": config_schema.PublisherAlarms,
    "subscriptions.NAME": config_schema.Subscription,
    "subscriptions.NAME.alarms": config_schema.SubscriptionAlarms,
    "subscriptions.NAME.validation": config_schema.Validation,
    "subscriptions.NAME.validation.tables.TABLE": config_schema.TableValidation,
    "groups.NAME": config_schema.Group,
    "timeouts": config_schema.Timeouts,
    "alarms": config_schema.Alarms,
    "alarms.notify": config_schema.Channel,
    "alarms.notify.email": config_schema.Email,
    "alarms.notify.webhook": config_schema.Webhook,
}

COMMON_OPTIONS: Final = frozenset({"--config", "--log-level", "--json", "--help"})
"""Described once, above the reference."""

GUIDES: Final[Mapping[str, str]] = {
    "alarms": "[Tell alarms](how-to/alarms.md)",
    "setup": "[Grant least privilege](how-to/least-privilege.md)",
    "capture": "[Act on a refused capture](how-to/capture-refused.md)",
    "certify": "[Certify a subscription](how-to/certify.md)",
    "backfill": "[Backfill a range](how-to/backfill.md)",
    "refresh": "[Change publications](how-to/changed-publications.md), [Reconcile](how-to/reconcile.md)",
    "resume": "[Resume a parked subscription](how-to/parked.md)",
    "validate": "[Validate](how-to/validate.md), [Act on a failed validation](how-to/validation-failed.md)",
    "plan": "[Plan a change of publications](how-to/plan.md)",
    "explain": "[Monitor](how-to/monitor.md#what-is-published)",
    "why": "[Explain a row](how-to/why.md)",
    "status": "[Monitor](how-to/monitor.md)",
    "verify-log": "[Prune and verify the change log](how-to/maintain-log.md)",
    "prune": "[Prune and verify the change log](how-to/maintain-log.md)",
}
"""The how-to guides of a command."""

_UNITS: Final = {"d": 86400, "h": 3600, "min": 60, "s": 1}


def configuration_keys() -> Iterator[tuple[str, str, str]]:
    """Key, default and meaning of every key of the configuration."""
    defaults = {field.name: field.default for field in dataclasses.fields(Timeouts)}
    for section, model in MODELS.items():
        for name, field in model.model_fields.items():
            default = defaults.get(name, field.default) if section == "timeouts" else field.default
            shown = "required" if field.is_required() else _yaml(default)
            yield f"{section}.{field.alias or name}", shown, " ".join((field.description or "").split())


def _yaml(default: object) -> str:
    """A default as it is written in the file; empty for None and for sections, which have their own rows."""
    if default is None or isinstance(default, BaseModel):
        return ""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{_duration(default) if isinstance(default, dt.timedelta) else default}`"


def _duration(duration: dt.timedelta) -> str:
    seconds = int(duration.total_seconds())
    unit = next((unit for unit, size in _UNITS.items() if seconds % size == 0), "s")
    return f"{seconds // _UNITS[unit]}{unit}" if seconds else "0"


def commands() -> dict[str, Any]:
    """The commands of the command line, by name."""
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def _describe(name: str, command: Any) -> str:  # noqa: ANN401 - click's class, which typer vendors
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    usage = [f"{argument.metavar}{'' if argument.nargs == 1 else '...'}" for argument in arguments]
    options = [
        (", ".join(f"`{option}`" for option in parameter.opts), _cell(parameter.help))
        for parameter in command.params
        if parameter.param_type_name == "option" and not COMMON_OPTIONS.intersection(parameter.opts)
    ]
    parts = [f"### {name}\n", f"    cdc-replay {' '.join([name, *usage])}\n", f"{_cell(command.help)}\n"]
    if options:
        parts.append("| option | |\n| --- | --- |\n" + "".join(f"| {o} | {text} |\n" for o, text in options))
    if name in GUIDES:
        parts.append(f"See {GUIDES[name]}.\n")
    return "\n".join(parts)


def _cell(text: str | None) -> str:
    """A help text on one line, as Markdown."""
    return re.sub(r"([|<*_])", r"\\\1", " ".join((text or "").split()))


def render_configuration() -> str:
    """The configuration page."""
    rows = "".join(f"| `{key}` | {default} | {meaning} |\n" for key, default, meaning in configuration_keys())
    return _replace_section(
        CONFIGURATION, "## Keys", f"| key | default | meaning |\n| --- | --- | --- |\n{rows}"
    )


def render_commands() -> str:
    """The commands page."""
    described = (_describe(name, command) for name, command in sorted(commands().items()))
    return _replace_section(COMMANDS, "## Reference", "\n".join(described))


def render_metrics() -> str:
    """The metrics page."""
    rows = "".join(
        f"| `{PREFIX}{name}` | {_tags(gauge)} | `{gauge.task}` | {gauge.unit} | {gauge.meaning} |\n"
        for name, gauge in GAUGES.items()
    )
    header = "| gauge | tag | set by the task | unit | meaning |\n| --- | --- | --- | --- | --- |\n"
    return _replace_section(METRICS, "## Gauges", f"{header}{rows}")


def _tags(gauge: Gauge) -> str:
    return ", ".join(f"`{tag}`" for tag in (gauge.tag, *gauge.more_tags))


def _replace_section(page: Path, heading: str, body: str) -> str:
    before, _, after = page.read_text(encoding="utf-8").partition(f"\n{heading}\n")
    _, end, rest = after.partition("\n## ")
    return f"{before}\n{heading}\n\n{body}{end}{rest}"


if __name__ == "__main__":
    CONFIGURATION.write_text(render_configuration(), encoding="utf-8")
    COMMANDS.write_text(render_commands(), encoding="utf-8")
    METRICS.write_text(render_metrics(), encoding="utf-8")
