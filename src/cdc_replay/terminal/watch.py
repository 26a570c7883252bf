"""A screen that is drawn again and again until Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console, RenderableType
from rich.live import Live


def watch(draw: Callable[[], RenderableType], seconds: float) -> None:
    """Draw in place every `seconds`; Ctrl-C leaves the last screen and returns."""
    console = Console(highlight=False)
    try:
        with Live(draw(), console=console, auto_refresh=False, vertical_overflow="visible") as live:
            while True:
                time.sleep(seconds)
                live.update(draw(), refresh=True)
    except KeyboardInterrupt:
        return
