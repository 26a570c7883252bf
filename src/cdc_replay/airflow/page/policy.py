"""Response headers that restrict what browsers may do with our pages.

Reports hold names and values that anybody who can write to the databases chooses. So they are sandboxed: even
unescaped markup would have another origin than Airflow and would run no script. The page is in a frame of
Airflow's UI. It runs the scripts of this package only, and Trusted Types refuse to make markup of a text.
"""

from __future__ import annotations

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

PAGE_HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": f"{_NOTHING}; script-src 'self'; style-src 'self'; connect-src 'self';"
    " require-trusted-types-for 'script'; trusted-types 'none'; frame-ancestors 'self'",
    "X-Frame-Options": "SAMEORIGIN",
}
"""For the page, in a frame of Airflow's UI."""
