"""Great Expectations, imported in one place.

The environment at import decides about its telemetry. Its import emits deprecation warnings of its own code,
which are ignored.
"""

from __future__ import annotations

import html
import logging
import os
import warnings
from collections.abc import Mapping
from typing import Any

os.environ["GX_ANALYTICS_ENABLED"] = "false"

# Its INFO lines are internals, two hundred while it is imported; the result has all that matters.
logging.getLogger("great_expectations").setLevel(logging.WARNING)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import great_expectations
    from great_expectations.checkpoint import UpdateDataDocsAction
    from great_expectations.core import ExpectationSuite, ExpectationValidationResult, ValidationDefinition
    from great_expectations.core.run_identifier import RunIdentifier
    from great_expectations.data_context import FileDataContext
    from great_expectations.data_context.types.resource_identifiers import ValidationResultIdentifier
    from great_expectations.execution_engine import PandasExecutionEngine
    from great_expectations.expectations.expectation import BatchExpectation
    from great_expectations.expectations.metadata_types import FailureSeverity
    from great_expectations.expectations.metrics.metric_provider import metric_value
    from great_expectations.expectations.metrics.table_metric_provider import TableMetricProvider


def exception_message(exception_info: Mapping[str, Any]) -> str | None:
    """The message of an exception, from the information itself or from one entry per metric.

    The markup of `suites` is undone.
    """
    entries = [exception_info] if "raised_exception" in exception_info else list(exception_info.values())
    messages = [
        html.unescape(str(entry["exception_message"])) for entry in entries if entry["raised_exception"]
    ]
    return "; ".join(dict.fromkeys(messages)) or None


get_context = great_expectations.get_context
Checkpoint = great_expectations.Checkpoint

__all__ = [
    "BatchExpectation",
    "Checkpoint",
    "ExpectationSuite",
    "ExpectationValidationResult",
    "FailureSeverity",
    "FileDataContext",
    "PandasExecutionEngine",
    "RunIdentifier",
    "TableMetricProvider",
    "UpdateDataDocsAction",
    "ValidationDefinition",
    "ValidationResultIdentifier",
    "exception_message",
    "get_context",
    "metric_value",
]
