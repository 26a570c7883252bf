"""Fixtures live in `tests/fixtures`, one concern per file."""

pytest_plugins = ["fixtures.postgres", "fixtures.spark", "fixtures.browser", "fixtures.airflow"]
