"""Scenarios that the product does not pass: name → (rule, reason). One that passes must leave this list."""

from __future__ import annotations

XFAIL: dict[str, tuple[str, str]] = {}
