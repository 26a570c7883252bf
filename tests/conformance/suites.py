"""Which scenarios run in which suite: one kind of roles for each in every run, both in the slow one."""

from __future__ import annotations

from typing import Final

SLOW: Final = "h_"
"""Prefix of scenarios that were found by looking for faults, and cross several rules at once."""

WITH_LEAST_PRIVILEGE: Final = ("seed_", "rf_", "part_", "cl_")
"""Prefixes of scenarios that every run plays with roles that own nothing, and the slow suite as superuser."""
