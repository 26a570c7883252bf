"""The texts of a notice: subject, plain text, JSON, and the text for chats.

Names come from configuration and catalogs, and connection errors from servers: hostile input. Each field is
one line of bounded length without control and format characters (so no second mail header, no reversed
text), passwords are replaced, and chats get no markup, no mention and no link but ours.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Final

from cdc_replay.errors import bounded
from cdc_replay.model.alarm import Alarm, Notice

LONGEST_SUBJECT: Final = 160
LONGEST_NAME: Final = 300
LONGEST_FIELD: Final = 800
MOST_SHOWN: Final = 20
"""Alarms of a notice that are shown one by one; the others are counted."""

_SEPARATORS: Final = frozenset({"Zl", "Zp"})
_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn"})

_SECRETS: Final = (
    re.compile(r"(?i)(\b[a-z][a-z0-9+.-]{0,30}://[^\s/:@]*:)\S*(?=@)"),
    re.compile(
        r"""(?ix) ( \b [a-z_]* (?: password | passwd | pwd | token | secret | api_?key ) ["']? \s* [=:] \s* )
            (?: '(?:\\.|[^'\\])*' | "(?:\\.|[^"\\])*" | [^\s,;&]+ )"""
    ),
)
"""Passwords in addresses and in options, after what remains of them."""


def one_line(text: str, longest: int = LONGEST_FIELD) -> str:
    """The text as one printable line of at most `longest` characters, without passwords."""
    text = bounded(text)
    for pattern in _SECRETS:
        text = pattern.sub(r"\1…", text)
    shown = "".join(_printable(character) for character in text)
    shown = " ".join(shown.split())
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}…"


def _printable(character: str) -> str:
    category = unicodedata.category(character)
    if character.isspace() or category in _SEPARATORS:
        return " "
    return "" if category in _HIDDEN else character


def subject_of(notice: Notice) -> str:
    """One line: what is new, or what is over."""
    alarms = notice.raised or notice.resolved
    first = one_line(f"{alarms[0].key.subject}: {alarms[0].message}", LONGEST_SUBJECT)
    # The worst is the first.
    state = alarms[0].severity.value if notice.raised else "resolved"
    further = len(notice.raised) + len(notice.resolved) - 1
    return f"[cdc-replay] {state}: {first}" + (f" (and {further} more)" if further else "")


def text_of(notice: Notice) -> str:
    """The whole notice as plain text, with a last newline."""
    blocks = [*_blocks(notice.raised, is_over=False), *_blocks(notice.resolved, is_over=True)]
    return "\n\n".join(blocks) + "\n"


def _blocks(alarms: Sequence[Alarm], *, is_over: bool) -> Iterator[str]:
    for alarm in alarms[:MOST_SHOWN]:
        state = "RESOLVED" if is_over else alarm.severity.value.upper()
        lines = [f"{state}: {one_line(alarm.key.subject, LONGEST_NAME)}: {one_line(alarm.message)}"]
        lines += [f"  {label:<6} {value}" for label, value in _facts(alarm, is_over=is_over) if value]
        yield "\n".join(lines)
    if len(alarms) > MOST_SHOWN:
        yield f"and {len(alarms) - MOST_SHOWN} more {'resolved' if is_over else 'alarms'}"


def _facts(alarm: Alarm, *, is_over: bool) -> Iterator[tuple[str, str]]:
    yield "since", one_line(alarm.since or "")
    yield "LSN", "" if alarm.lsn is None else str(alarm.lsn)
    if not is_over:
        yield "hint", one_line(alarm.hint)
    yield "link", one_line(alarm.link)


def json_of(notice: Notice) -> dict[str, object]:
    """The notice for a webhook: `subject`, `text`, and the alarms as objects."""
    return {
        "subject": subject_of(notice),
        "text": text_of(notice),
        "raised": [_object(alarm) for alarm in notice.raised[:MOST_SHOWN]],
        "resolved": [_object(alarm) for alarm in notice.resolved[:MOST_SHOWN]],
        "more": max(0, len(notice.raised) - MOST_SHOWN) + max(0, len(notice.resolved) - MOST_SHOWN),
    }


def _object(alarm: Alarm) -> dict[str, str | None]:
    return {
        "subject": one_line(alarm.key.subject, LONGEST_NAME),
        "kind": alarm.key.kind,
        "part": one_line(alarm.key.part, LONGEST_NAME) or None,
        "severity": alarm.severity.value,
        "message": one_line(alarm.message),
        "since": one_line(alarm.since or "") or None,
        "lsn": None if alarm.lsn is None else str(alarm.lsn),
        "hint": one_line(alarm.hint) or None,
        "link": one_line(alarm.link) or None,
    }


def chat_of(notice: Notice) -> dict[str, object]:
    """The notice for Slack and chats with the same webhooks: no mention, no markup, no hidden link."""
    return {"text": escape_chat(f"{subject_of(notice)}\n\n{text_of(notice)}"), "mrkdwn": False}


def escape_chat(text: str) -> str:
    """A text that a chat shows as it is: `&`, `<`, `>` escaped, `@` and `](` broken by a zero-width space."""
    for plain, shown in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("@", "@\u200b"), ("](", "]\u200b(")):
        text = text.replace(plain, shown)
    return text
