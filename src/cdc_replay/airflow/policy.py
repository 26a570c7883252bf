"""What browsers may do with our answers: nothing that they do not need.

Reports hold names and values of whoever may write to the databases, so they are sandboxed: even markup that
slipped through has another origin than Airflow and runs no script. The status page is in a frame of Airflow's
UI and loads itself again, which a sandbox forbids; it has no script, and no style but its own.
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
"""Of every answer, unless it says otherwise."""

REPORT_HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": f"{_NOTHING}; style-src 'unsafe-inline'; frame-ancestors 'none'; sandbox",
}
"""Of reports: earlier versions wrote them with other styles."""


def framed_headers(style: str) -> Mapping[str, str]:
    """Of a page of ours with exactly this style, in a frame of Airflow's UI."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return {
        "Content-Security-Policy": f"{_NOTHING}; style-src 'sha256-{digest}'; frame-ancestors 'self'",
        "X-Frame-Options": "SAMEORIGIN",
    }
