"""Where notices go: mail by SMTP, and webhooks.

Secrets come from a connection (`channel_connection`), which is resolved when a notice is sent. TLS is on by
default and checks the server's certificate; a password is never sent without it. Every answer has a timeout,
and so has the delivery; redirects are not followed, and answers are not shown: they could repeat what was
sent.

| channel | the connection's fields                                                                     |
|---------|---------------------------------------------------------------------------------------------|
| email   | host, port, login, password; extra as of Airflow's SMTP provider: `disable_ssl` (STARTTLS   |
|         | instead), `disable_tls` (neither), `from_email`, `timeout`                                  |
| webhook | an address: type http or https, host, port, schema or path, extra `path`, `query`; or the   |
|         | whole address as the host, as Airflow's HTTP provider has it; password: a bearer token      |
"""

from __future__ import annotations

import contextlib
import json
import logging
import smtplib
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from email.errors import MessageError
from email.headerregistry import Address
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import format_datetime, localtime, make_msgid, parseaddr
from http.client import HTTPException, HTTPMessage
from typing import IO, Final, Protocol, TypeAlias, TypeVar

from cdc_replay.alarm.channel_connection import ChannelConnection
from cdc_replay.alarm.message import chat_of, json_of, one_line, subject_of, text_of
from cdc_replay.errors import ChannelFailed, InvalidConfiguration
from cdc_replay.model.alarm import Notice

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

DEFAULT_SECONDS: Final = 20.0
"""For each answer that is waited for."""

ANSWERS: Final = 3
"""A delivery may take as long as so many answers, however slowly its peer sends them."""
SUBMISSION_TLS: Final = 465
SUBMISSION: Final = 587

Resolver: TypeAlias = Callable[[str], ChannelConnection]


class Channel(Protocol):
    """Something that takes notices."""

    @property
    def name(self) -> str:
        """The channel in logs, results and the memory; it has no secret."""

    def send(self, notice: Notice) -> None:
        """Send one notice.

        Raises:
            ChannelFailed: if it was not accepted.
            InvalidConfiguration: if the channel's connection is not known or not usable.
        """


@dataclass(frozen=True, slots=True)
class EmailChannel:
    """Mail to `to`, by the SMTP server of a connection."""

    conn_id: str
    to: tuple[str, ...]
    sender: str | None
    resolve: Resolver

    @property
    def name(self) -> str:
        """See `Channel`."""
        return f"email {', '.join(self.to)} by {self.conn_id}"

    def send(self, notice: Notice) -> None:
        """See `Channel`."""
        connection = self.resolve(self.conn_id)
        message = self._message(notice, connection)

        def deliver() -> int:
            with _smtp(connection) as client:
                return len(client.send_message(message))

        try:
            refused = _deliver_in_time(self.name, connection, deliver)
        except (smtplib.SMTPException, OSError, UnicodeError) as error:
            raise ChannelFailed(f'channel "{self.name}" failed: {_reason(error)}') from None
        if refused:  # but not all: the others have the mail, and must not get it again
            logger.warning(
                'channel "%s": the server refused %d of %d recipients', self.name, refused, len(self.to)
            )

    def _message(self, notice: Notice, connection: ChannelConnection) -> EmailMessage:
        name, sender = parseaddr(self.sender or connection.text("from_email") or connection.login)
        if "@" not in sender:
            raise InvalidConfiguration(
                f'channel "{self.name}" has no sender',
                hint="Give `from`, or `from_email` in the extra of the connection.",
            )
        message = EmailMessage(policy=SMTP)
        try:
            message["From"] = Address(display_name=one_line(name) or "cdc-replay", addr_spec=sender)
            message["To"] = tuple(Address(addr_spec=address) for address in self.to)
        except (ValueError, IndexError, MessageError):  # as it happens, for what is no address
            raise InvalidConfiguration(
                f'channel "{self.name}" has a sender or a recipient that is no address',
                hint="Correct `to` and `from`, or `from_email` in the extra of the connection.",
            ) from None
        message["Subject"] = subject_of(notice)
        message["Date"] = format_datetime(localtime())
        message["Message-ID"] = make_msgid(domain=sender.rpartition("@")[2])
        message["Auto-Submitted"] = "auto-generated"
        message.set_content(text_of(notice), charset="utf-8")
        return message


@contextlib.contextmanager
def _smtp(connection: ChannelConnection) -> Iterator[smtplib.SMTP]:
    seconds = connection.seconds or DEFAULT_SECONDS
    context = ssl.create_default_context()
    uses_starttls = connection.flag("disable_ssl")
    is_plain = uses_starttls and connection.flag("disable_tls")
    if is_plain and connection.password:
        raise InvalidConfiguration(
            "a password is not sent without TLS",
            detail="The connection of a mail channel has a password, `disable_ssl` and `disable_tls`.",
            hint="Remove `disable_tls` for STARTTLS, or both for TLS from the start.",
        )
    if uses_starttls:
        port = connection.port or (25 if is_plain else SUBMISSION)
        client = smtplib.SMTP(connection.host, port, timeout=seconds)
    else:
        port = connection.port or SUBMISSION_TLS
        client = smtplib.SMTP_SSL(connection.host, port, timeout=seconds, context=context)
    with client:
        if uses_starttls and not is_plain:
            client.starttls(context=context)
        if connection.login and connection.password:
            client.login(connection.login, connection.password)
        yield client


@dataclass(frozen=True, slots=True)
class WebhookChannel:
    """A POST of JSON to the address of a connection; `is_chat`: in the form that Slack takes."""

    conn_id: str
    is_chat: bool
    resolve: Resolver

    @property
    def name(self) -> str:
        """See `Channel`."""
        return f"webhook {self.conn_id}"

    def send(self, notice: Notice) -> None:
        """See `Channel`."""
        connection = self.resolve(self.conn_id)
        body = json.dumps(chat_of(notice) if self.is_chat else json_of(notice), ensure_ascii=False)
        headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": "cdc-replay"}
        if connection.password:
            headers["Authorization"] = f"Bearer {connection.password}"
        seconds = connection.seconds or DEFAULT_SECONDS

        def deliver() -> None:
            with _opener().open(request, timeout=seconds):
                pass  # any 2xx: the answer is not needed

        try:
            request = urllib.request.Request(  # noqa: S310 - `url` refuses other schemes than http and https
                connection.url(self.conn_id), body.encode("utf-8", "replace"), headers, method="POST"
            )
            _deliver_in_time(self.name, connection, deliver)
        except urllib.error.HTTPError as error:
            with error:
                raise ChannelFailed(f'channel "{self.name}" failed: status {error.code}') from None
        except (OSError, HTTPException, ValueError) as error:
            raise ChannelFailed(f'channel "{self.name}" failed: {_reason(error)}') from None


def _deliver_in_time(name: str, connection: ChannelConnection, deliver: Callable[[], _T]) -> _T:
    """Deliver a notice, or leave a peer alone that keeps us waiting by sending a byte now and then.

    Raises:
        ChannelFailed: if it takes too long. Its thread ends with the process.
    """
    seconds = ANSWERS * (connection.seconds or DEFAULT_SECONDS)
    delivered = Future[_T]()

    def run() -> None:
        try:
            delivered.set_result(deliver())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
            delivered.set_exception(error)

    threading.Thread(target=run, name=f"deliver by {name}", daemon=True).start()
    try:
        return delivered.result(seconds)
    except FutureTimeout:
        if delivered.done():
            raise
        raise ChannelFailed(f'channel "{name}" failed: not delivered within {seconds:.0f} s') from None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> None:
        """A redirect is the answer, an error: another address must not get the token."""


def _opener() -> urllib.request.OpenerDirector:
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(context=ssl.create_default_context()),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _NoRedirects(),
    ):
        opener.add_handler(handler)
    return opener


def _reason(error: Exception) -> str:
    """The kind of the error, and its cause without what the peer or the address may say."""
    if isinstance(error, smtplib.SMTPResponseException):
        return f"{type(error).__name__} {error.smtp_code}"
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, Exception):
        return _reason(error.reason)
    if isinstance(error, OSError) and error.strerror:
        return one_line(error.strerror)
    return type(error).__name__
