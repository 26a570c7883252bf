"""Texts of alarms: hostile names stay text of one line, passwords are not sent."""

from __future__ import annotations

import json

import pytest

from cdc_replay.alarm.message import (
    LONGEST_FIELD,
    MOST_SHOWN,
    chat_of,
    json_of,
    one_line,
    subject_of,
    text_of,
)
from cdc_replay.model.alarm import Alarm, AlarmKey, AlarmKind, Notice, Severity
from cdc_replay.model.lsn import Lsn

HOSTILE = 'a"b\r\nBcc: all@example.com\r\n\r\n<script>@channel <!here> [x](http://evil) \x1b[31m\u202e\u2028z'


def alarm(name: str = "nsw", message: str = "is parked", severity: Severity = Severity.CRITICAL) -> Alarm:
    key = AlarmKey(f"subscription {name}", AlarmKind.PARKED.value)
    since, link = "2026-01-01T00:00:00+00:00", "https://airflow/plugin/cdc-replay"
    return Alarm(key, severity, message, "Run `cdc-replay resume nsw`.", since, Lsn(0x16B3748), link)


def test_the_text_has_subscription_since_when_lsn_hint_and_link() -> None:
    assert text_of(Notice((alarm(),), (alarm("act"),))) == (
        "CRITICAL: subscription nsw: is parked\n"
        "  since  2026-01-01T00:00:00+00:00\n"
        "  LSN    0/16B3748\n"
        "  hint   Run `cdc-replay resume nsw`.\n"
        "  link   https://airflow/plugin/cdc-replay\n"
        "\n"
        "RESOLVED: subscription act: is parked\n"
        "  since  2026-01-01T00:00:00+00:00\n"
        "  LSN    0/16B3748\n"
        "  link   https://airflow/plugin/cdc-replay\n"
    )
    assert subject_of(Notice((alarm(),), (alarm("act"),))) == (
        "[cdc-replay] critical: subscription nsw: is parked (and 1 more)"
    )
    assert subject_of(Notice((), (alarm("act"),))) == "[cdc-replay] resolved: subscription act: is parked"


def test_a_field_is_one_printable_line_of_bounded_length() -> None:
    shown = one_line(HOSTILE)
    assert shown == 'a"b Bcc: all@example.com <script>@channel <!here> [x](http://evil) [31m z'
    assert len(one_line("é" * 10_000)) == LONGEST_FIELD
    # Searched for passwords from each dot on, these would take hours.
    assert len(one_line("a." * 500_000)) == LONGEST_FIELD
    assert text_of(Notice((alarm(HOSTILE, HOSTILE),))).count("\n") == 5


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://me:s3cret@host/db failed",
        "postgres://me:s3/cr#et@host",
        "host=h password=s3cret dbname=d",
        "host=h password='s3\\'cret x' dbname=d",
        'sslpassword = "s3cret"',
        "PGPASSWORD=s3cret psql",
        '{"password": "s3cret"}',
        "api_key: s3cret, more",
        "?user=me&password=s3cret&x=1",
    ],
)
def test_passwords_are_replaced(text: str) -> None:
    shown = one_line(text)
    assert "s3" not in shown
    assert "cr" not in shown
    assert "…" in shown


def test_json_is_data() -> None:
    form = json.loads(json.dumps(json_of(Notice((alarm(HOSTILE),)))))
    (raised,) = form["raised"]
    assert raised["subject"].startswith('subscription a"b Bcc:')
    assert (raised["kind"], raised["severity"], raised["lsn"]) == ("parked", "critical", "0/16B3748")
    assert (raised["since"], raised["link"]) == (
        "2026-01-01T00:00:00+00:00",
        "https://airflow/plugin/cdc-replay",
    )
    assert form["resolved"] == []


def test_a_chat_gets_no_mention_and_no_markup() -> None:
    text = str(chat_of(Notice((alarm(HOSTILE),)))["text"])
    assert "<" not in text
    assert ">" not in text
    assert "@channel" not in text
    assert "](" not in text
    assert "&lt;!here&gt;" in text


def test_many_alarms_are_one_message_of_bounded_length() -> None:
    notice = Notice(tuple(alarm(f"s{number}", "x" * 5000) for number in range(500)))
    text = text_of(notice)
    assert text.count("CRITICAL") == MOST_SHOWN
    assert f"and {500 - MOST_SHOWN} more alarms" in text
    assert len(text) < 40_000
    assert len(subject_of(notice)) < 220
    assert json_of(notice)["more"] == 500 - MOST_SHOWN
