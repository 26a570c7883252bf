"""`alarms` on a screen: what holds now, and who was told."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from cdc_replay.model.alarm import AlarmsResult, Severity
from cdc_replay.terminal.layout import BAD, DOUBTFUL, labelled, text


def alarms_view(result: AlarmsResult) -> RenderableType:
    """Each alarm with what to do about it, then one line per channel that was told."""
    return Group(*_lines(result))


def _lines(result: AlarmsResult) -> Iterator[RenderableType]:
    for alarm in result.alarms:
        style = BAD if alarm.severity is Severity.CRITICAL else DOUBTFUL
        yield Text.assemble(text(alarm.key.subject, style), ": ", text(alarm.message))
        if alarm.hint:
            yield labelled([("→", text(alarm.hint))])
    for channel, count in result.sent.items():
        over = result.resolved.get(channel, 0)
        yield text(f"told {channel}: {count} new or worse, {over} resolved")
