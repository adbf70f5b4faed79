"""What all commands share: one-line errors with an exit status, and logging to stderr.

Between click and the package's errors. Knows no command.
"""

from __future__ import annotations

import functools
import logging
import sys
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import click
import structlog

from ..errors import ConfigError, LocalMisuse, Pp1qError

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")


def command_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Turns the package's errors into one line on stderr: exit 2 for misuse and settings, 1 for the rest, 130 for Ctrl-C."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (ConfigError, LocalMisuse) as error:
            click.echo(f"pp1q: {error}", err=True)
            sys.exit(2)
        except Pp1qError as error:
            click.echo(f"pp1q: {error}", err=True)
            sys.exit(1)
        except KeyboardInterrupt:
            click.echo("pp1q: interrupted", err=True)
            sys.exit(130)

    return wrapper


def setup_logging(verbose: int) -> None:
    """Logs to stderr: for people on a terminal, JSON otherwise. -1 errors only, 0 warnings, 1 info, 2 debug."""
    level = {-1: logging.ERROR, 0: logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG)
    terminal = sys.stderr.isatty()
    renderer = structlog.dev.ConsoleRenderer(colors=terminal) if terminal else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
