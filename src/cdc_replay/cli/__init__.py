"""`cdc-replay`: the command line (`cli.program`)."""

from __future__ import annotations

from cdc_replay.cli import look, remove, repair, replicate, set_up
from cdc_replay.cli.app import app
from cdc_replay.cli.program import main, run_line

__all__ = ["app", "look", "main", "remove", "repair", "replicate", "run_line", "set_up"]
