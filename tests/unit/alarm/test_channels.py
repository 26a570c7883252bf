"""Channels with real sockets: what arrives, what is refused, and what is never sent."""

from __future__ import annotations

import contextlib
import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from cdc_replay.alarm.channel_connection import ChannelConnection
from cdc_replay.alarm.channels import EmailChannel, WebhookChannel
from cdc_replay.errors import ChannelFailed, InvalidConfiguration
from cdc_replay.model.alarm import Alarm, AlarmKey, AlarmKind, Notice, Severity
from fixtures.alarm_sinks import Certificate, SmtpSink, WebhookSink, smtp_server

NASTY = "x\r\nBcc: evil@example.com\r\n\r\nhello é\u202e"
NOTICE = Notice(
    (Alarm(AlarmKey(f"subscription {NASTY}", AlarmKind.LAG.value), Severity.WARNING, "lags", "do", "now"),)
)
PLAIN = {"disable_ssl": True, "disable_tls": True, "timeout": 5}


def mail(connection: ChannelConnection) -> EmailChannel:
    return EmailChannel("smtp", ("ops@example.com", "b@example.com"), "cdc@example.com", lambda _: connection)


def server(sink: SmtpSink | WebhookSink, **fields: Any) -> ChannelConnection:
    return replace(ChannelConnection(host="127.0.0.1", port=sink.port), **fields)


@pytest.fixture
def tls_sink(certificate: Certificate) -> Iterator[SmtpSink]:
    with smtp_server(certificate.context) as sink:
        yield sink


@pytest.fixture
def trust(certificate: Certificate, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Have clients trust the sink's certificate."""
    return lambda: monkeypatch.setenv("SSL_CERT_FILE", str(certificate.file))


def test_a_mail_has_one_header_per_header_and_the_text(smtp_sink: SmtpSink) -> None:
    mail(server(smtp_sink, extra=PLAIN)).send(NOTICE)
    (received,) = smtp_sink.mails
    subject = " ".join(str(received["Subject"]).split())
    assert subject == "[cdc-replay] warning: subscription x Bcc: evil@example.com hello é: lags"
    assert received["From"] == "cdc-replay <cdc@example.com>"
    assert received["To"] == "ops@example.com, b@example.com"
    assert received["Auto-Submitted"] == "auto-generated"
    assert received["Bcc"] is None
    assert received.get_content_type() == "text/plain"
    assert "  hint   do\n" in smtp_sink.body()
    assert smtp_sink.commands.count("RCPT") == 2


def test_tls_is_used_by_default_and_the_certificate_is_checked(
    tls_sink: SmtpSink, trust: Callable[[], None]
) -> None:
    tls_sink.starts_with_tls = True
    secret = server(tls_sink, login="me", password="s3cret", extra={"timeout": 5})
    with pytest.raises(ChannelFailed, match=r"SSLCertVerificationError|CERTIFICATE_VERIFY_FAILED"):
        mail(secret).send(NOTICE)
    assert (tls_sink.logins, tls_sink.mails) == ([], [])
    trust()
    mail(secret).send(NOTICE)
    assert tls_sink.logins == ["\0me\0s3cret"]
    assert len(tls_sink.mails) == 1


def test_starttls_is_used_without_ssl_and_is_required(
    tls_sink: SmtpSink, smtp_sink: SmtpSink, trust: Callable[[], None]
) -> None:
    trust()
    starttls = {"disable_ssl": "true", "timeout": "5"}
    mail(server(tls_sink, login="me", password="s3cret", extra=starttls)).send(NOTICE)
    assert tls_sink.commands[:4] == ["EHLO", "STARTTLS", "EHLO", "AUTH"]
    with pytest.raises(ChannelFailed, match="SMTPNotSupportedError"):
        mail(server(smtp_sink, login="me", password="s3cret", extra=starttls)).send(NOTICE)
    assert (smtp_sink.logins, smtp_sink.mails) == ([], [])


def test_a_password_is_not_sent_without_tls(smtp_sink: SmtpSink) -> None:
    with pytest.raises(InvalidConfiguration, match="without TLS"):
        mail(server(smtp_sink, login="me", password="s3cret", extra=PLAIN)).send(NOTICE)
    assert smtp_sink.commands == []


def test_a_server_that_refuses_or_is_not_there_is_a_failed_channel(smtp_sink: SmtpSink) -> None:
    smtp_sink.refuses = True
    with pytest.raises(ChannelFailed, match="SMTPDataError 451"):
        mail(server(smtp_sink, extra=PLAIN)).send(NOTICE)
    with pytest.raises(ChannelFailed, match="refused"):
        mail(ChannelConnection(host="127.0.0.1", port=1, extra=PLAIN)).send(NOTICE)


def test_a_mail_that_some_recipients_got_is_sent(
    smtp_sink: SmtpSink, caplog: pytest.LogCaptureFixture
) -> None:
    smtp_sink.unknown = frozenset({"b@example.com"})
    mail(server(smtp_sink, extra=PLAIN)).send(NOTICE)
    assert (len(smtp_sink.mails), smtp_sink.mails[0]["To"]) == (1, "ops@example.com, b@example.com")
    assert "refused 1 of 2 recipients" in caplog.text
    smtp_sink.unknown |= {"ops@example.com"}
    with pytest.raises(ChannelFailed, match="SMTPRecipientsRefused"):
        mail(server(smtp_sink, extra=PLAIN)).send(NOTICE)


def test_a_sender_is_needed(smtp_sink: SmtpSink) -> None:
    connection = server(smtp_sink, extra=PLAIN)
    with pytest.raises(InvalidConfiguration, match="no sender"):
        EmailChannel("smtp", ("a@example.com",), None, lambda _: connection).send(NOTICE)
    named = replace(connection, extra=PLAIN | {"from_email": "from@example.com"})
    EmailChannel("smtp", ("a@example.com",), None, lambda _: named).send(NOTICE)
    assert smtp_sink.mails[0]["From"] == "cdc-replay <from@example.com>"


@pytest.mark.parametrize(
    ("sender", "shown"),
    [
        ("Airflow <airflow@b.example>", "Airflow <airflow@b.example>"),
        ("<airflow@b.example>", "cdc-replay <airflow@b.example>"),
        ("jürgen@b.example", None),
        ("a..b@x", None),
        ("a@", None),
        ("a@b@c", None),
    ],
)
def test_a_sender_may_have_a_name_and_is_refused_if_it_is_no_address(
    smtp_sink: SmtpSink, sender: str, shown: str | None
) -> None:
    connection = server(smtp_sink, extra=PLAIN | {"from_email": sender})
    channel = EmailChannel("smtp", ("a@example.com",), None, lambda _: connection)
    if shown is None:
        with pytest.raises(InvalidConfiguration, match="by smtp"):
            channel.send(NOTICE)
    else:
        channel.send(NOTICE)
    assert [mail["From"] for mail in smtp_sink.mails] == ([] if shown is None else [shown])


def hook(connection: ChannelConnection, *, is_chat: bool = False) -> WebhookChannel:
    return WebhookChannel("ops", is_chat, lambda _: connection)


def test_a_webhook_gets_json_with_the_token(webhook_sink: WebhookSink) -> None:
    hook(server(webhook_sink, kind="http", password="t0ken", extra={"path": "/a b/c"})).send(NOTICE)
    assert webhook_sink.paths == ["/a%20b/c"]
    assert webhook_sink.headers[0]["Authorization"] == "Bearer t0ken"
    (post,) = webhook_sink.posts
    assert post["raised"][0]["subject"] == "subscription x Bcc: evil@example.com hello é"
    hook(server(webhook_sink, kind="http"), is_chat=True).send(NOTICE)
    assert set(webhook_sink.posts[1]) == {"text", "mrkdwn"}


@pytest.mark.parametrize("status", [301, 302, 307, 308, 400, 500])
def test_redirects_and_errors_are_failures(webhook_sink: WebhookSink, status: int) -> None:
    webhook_sink.status, webhook_sink.location = status, f"http://127.0.0.1:{webhook_sink.port}/other"
    with pytest.raises(ChannelFailed, match=f"status {status}"):
        hook(server(webhook_sink, kind="http", password="t0ken")).send(NOTICE)
    assert len(webhook_sink.paths) == 1


@pytest.mark.parametrize(
    "connection",
    [
        ChannelConnection(kind="file", host="/etc/passwd"),
        ChannelConnection(host="file:///etc/passwd"),
        ChannelConnection(kind="ftp", host="h"),
        ChannelConnection(kind="http", host=""),
        ChannelConnection(kind="http", host="https://me:t0ken@h/x"),
        ChannelConnection(kind="http", host="http://h/\r\nX: t0ken"),
        ChannelConnection(kind="http", host="http://[t0ken"),
    ],
)
def test_only_addresses_of_http_are_called_and_none_is_repeated(connection: ChannelConnection) -> None:
    with pytest.raises(InvalidConfiguration, match='connection "ops" of a webhook') as refused:
        hook(connection).send(NOTICE)
    assert "t0ken" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("https://hooks.example.com/services/a/b?c=d", "https://hooks.example.com/services/a/b?c=d"),
        ("http://hooks.example.com:8080", "http://hooks.example.com:8080"),
        (
            json.dumps(
                {"conn_type": "http", "host": "h", "port": 8, "schema": "https", "extra": '{"path": "x"}'}
            ),
            "https://h:8/x",
        ),
        (json.dumps({"conn_type": "http", "host": "https://h/y"}), "https://h/y"),
    ],
)
def test_connections_of_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, address: str) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_OPS", text)
    assert ChannelConnection.from_environment("ops").url("ops") == address


def test_a_mail_connection_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_OPS", "smtp://me:p%40ss@mail:587/?disable_ssl=True&from_email=a%40b.c")
    connection = ChannelConnection.from_environment("ops")
    assert (connection.host, connection.port, connection.password) == ("mail", 587, "p@ss")
    assert (connection.flag("disable_ssl"), connection.text("from_email")) == (True, "a@b.c")
    assert "p@ss" not in repr(connection)
    for broken in ('{"host": s3cret', "smtp://h:s3cret", '{"port": "s3cret"}'):
        monkeypatch.setenv("AIRFLOW_CONN_OPS", broken)
        with pytest.raises(InvalidConfiguration, match="cannot be parsed") as refused:
            ChannelConnection.from_environment("ops")
        assert "s3cret" not in str(refused.value)
    monkeypatch.delenv("AIRFLOW_CONN_OPS")
    with pytest.raises(InvalidConfiguration, match="is not known"):
        ChannelConnection.from_environment("ops")


@contextlib.contextmanager
def dripping(begin: bytes) -> Iterator[int]:
    """A peer that begins an answer and never ends it, one byte after another; its port."""
    stop = threading.Event()

    class Drip(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                self.request.sendall(begin)
                while not stop.wait(0.1):
                    self.request.sendall(b"x")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Drip) as listening:
        listening.daemon_threads = True
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield listening.server_address[1]
        stop.set()
        listening.shutdown()


@pytest.mark.parametrize("kind", ["mail", "webhook"])
def test_a_peer_that_sends_a_byte_now_and_then_is_left_alone(kind: str) -> None:
    with dripping(b"220 " if kind == "mail" else b"HTTP/1.1 200 OK\r\nX: ") as port:
        connection = ChannelConnection(
            kind="smtp" if kind == "mail" else "http",
            host="127.0.0.1",
            port=port,
            extra={**PLAIN, "timeout": 1},
        )
        channel = mail(connection) if kind == "mail" else WebhookChannel("hook", False, lambda _: connection)
        with pytest.raises(ChannelFailed, match="not delivered within 3 s"):
            channel.send(NOTICE)
