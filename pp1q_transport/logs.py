"""The package's logger: structlog as the program configured it, or warnings on stderr where it configured nothing.

Between every part that logs and structlog. A library must not write to its user's stdout.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog


def logger(**bound: object) -> Any:
    """A bound logger. Call it when an engine is made, not at import: the program may configure structlog until then."""
    if structlog.is_configured():
        return structlog.get_logger("pp1q").bind(**bound)
    plain = structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.dev.ConsoleRenderer(colors=False) if sys.stderr.isatty() else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
    )
    return plain.bind(**bound)


def named_logger(role: str, name: str) -> Any:
    """The logger of one end that speaks to the peer of that name, "" where nobody named it."""
    return logger(role=role, **({"with_peer": name} if name else {}))
