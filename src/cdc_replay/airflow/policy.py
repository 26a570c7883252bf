"""Response headers that restrict what browsers may do with our pages.

Reports hold names and values that anybody who can write to the databases chooses. So they are sandboxed: even
unescaped markup would have another origin than Airflow and would run no script. The status page is in a frame
of Airflow's UI and reloads itself, which a sandbox forbids; it has no script, and only its own style.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Final

_NOTHING: Final = "default-src 'none'; base-uri 'none'; form-action 'none'"

HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": f"{_NOTHING}; frame-ancestors 'none'; sandbox",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Defaults for every response."""

REPORT_HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": f"{_NOTHING}; style-src 'unsafe-inline'; frame-ancestors 'none'; sandbox",
}
"""For reports; earlier versions wrote them with other styles, so any inline style is allowed."""


def framed_headers(style: str) -> Mapping[str, str]:
    """For our page with exactly this style, in a frame of Airflow's UI."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return {
        "Content-Security-Policy": f"{_NOTHING}; style-src 'sha256-{digest}'; frame-ancestors 'self'",
        "X-Frame-Options": "SAMEORIGIN",
    }
