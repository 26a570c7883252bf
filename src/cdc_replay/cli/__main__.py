"""`python -m cdc_replay.cli`."""

from cdc_replay.cli import main

main()
