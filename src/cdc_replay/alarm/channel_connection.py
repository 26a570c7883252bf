"""The connection of a channel: fields of an Airflow connection, from Airflow or from the environment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from cdc_replay.errors import InvalidConfiguration


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelConnection:
    """The fields under Airflow's names. Every text may be a secret: a webhook's path often is one."""

    kind: str = ""
    host: str = field(default="", repr=False)
    port: int | None = None
    login: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    schema: str = field(default="", repr=False)
    extra: Mapping[str, object] = field(default_factory=dict, repr=False)

    @classmethod
    def from_environment(cls, conn_id: str) -> Self:
        """The connection of `AIRFLOW_CONN_<ID>`, in URI or JSON form.

        Raises:
            InvalidConfiguration: if the variable is not set, or cannot be parsed.
        """
        variable = f"AIRFLOW_CONN_{conn_id.upper()}"
        text = os.environ.get(variable, "").strip()
        if not text:
            raise InvalidConfiguration(
                f'connection "{conn_id}" of a channel is not known',
                detail=f"The environment variable {variable} is not set.",
                hint="Set it to an Airflow connection in URI or JSON form, such as"
                " smtp://user:password@mail.example.com or https://hooks.example.com/path.",
            )
        try:
            return cls._from_json(text) if text.startswith("{") else cls._from_uri(text)
        except (ValueError, TypeError, AttributeError):
            # Without the cause, which may repeat the text.
            raise InvalidConfiguration(f'connection "{conn_id}" of a channel cannot be parsed') from None

    @classmethod
    def _from_json(cls, text: str) -> Self:
        form = json.loads(text)
        extra = form.get("extra") or {}
        return cls(
            kind=str(form.get("conn_type") or ""),
            host=str(form.get("host") or ""),
            port=int(form["port"]) if form.get("port") else None,
            login=str(form.get("login") or ""),
            password=str(form.get("password") or ""),
            schema=str(form.get("schema") or ""),
            extra=json.loads(extra) if isinstance(extra, str) else dict(extra),
        )

    @classmethod
    def _from_uri(cls, text: str) -> Self:
        parts = urlsplit(text)
        query: dict[str, object] = dict(parse_qsl(parts.query, keep_blank_values=True))
        is_web = parts.scheme in {"http", "https"}
        further = query.pop("__extra__", None)
        if is_web:
            # Here the URI is the address itself; Airflow would take the path for a schema.
            query = {"path": parts.path, "query": parts.query}
        return cls(
            kind=parts.scheme,
            host=unquote(parts.hostname or ""),
            port=parts.port,
            login=unquote(parts.username or ""),
            password=unquote(parts.password or ""),
            schema="" if is_web else unquote(parts.path.lstrip("/")),
            extra=query | (json.loads(str(further)) if further else {}),
        )

    def text(self, key: str) -> str:
        """A field of the extra as text; empty if it is missing."""
        value = self.extra.get(key)
        return "" if value is None else str(value)

    def flag(self, key: str) -> bool:
        """A field of the extra as Airflow's forms and URIs write truth."""
        return self.text(key).strip().lower() in {"true", "1", "t", "yes", "on"}

    @property
    def seconds(self) -> float | None:
        """The timeout in the extra, between 1 and 300 seconds; None if there is none."""
        try:
            return min(300.0, max(1.0, float(self.text("timeout"))))
        except ValueError:
            return None

    def url(self, conn_id: str) -> str:
        """The address of a webhook.

        Raises:
            InvalidConfiguration: if it is not one of http or https; the message does not repeat it.
        """
        host, scheme = self.host, self.schema if self.schema in {"http", "https"} else self.kind
        if "://" in host:
            address = host
        else:
            path = self.text("path") or ("" if self.schema == scheme else self.schema)
            query = f"?{self.text('query')}" if self.text("query") else ""
            shown = f"[{host}]" if ":" in host else host
            port = f":{self.port}" if self.port else ""
            path = quote(path if path.startswith("/") or not path else f"/{path}", safe="/%:@!$&'()*+,;=~-._")
            address = f"{scheme}://{shown}{port}{path}{query}"
        try:
            parts = urlsplit(address)
            is_usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and "@" not in parts.netloc
        except ValueError:
            is_usable = False
        if not is_usable or any(character <= " " for character in address):
            raise InvalidConfiguration(
                f'connection "{conn_id}" of a webhook is no address of http or https',
                hint="Give a connection of type http or https; a token goes into its password.",
            )
        return address
