"""Fixtures live in `tests/fixtures`, one concern per file."""

pytest_plugins = ["fixtures.airflow", "fixtures.postgres", "fixtures.spark"]
