"""`cdc-replay`: the command line (`cli.program`).

Modules are imported in the order that their panels have in the help.
"""

from __future__ import annotations

from cdc_replay.cli import set_up

# isort: split
from cdc_replay.cli import replicate

# isort: split
from cdc_replay.cli import repair

# isort: split
from cdc_replay.cli import look

# isort: split
from cdc_replay.cli import remove

# isort: split
from cdc_replay.cli.app import app
from cdc_replay.cli.program import main, run_line

__all__ = ["app", "look", "main", "remove", "repair", "replicate", "run_line", "set_up"]
