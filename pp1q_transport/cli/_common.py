"""What all commands share: one-line errors with an exit status, and logging to stderr.

Between click and the package's errors. Knows no command.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import signal
import sys
import threading
from typing import IO, TYPE_CHECKING, Any, ParamSpec, TypeVar

import click
import structlog

from ..errors import ConfigError, LocalMisuse, Pp1qError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

P = ParamSpec("P")
R = TypeVar("R")
_NUMBERS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def command_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Turns the package's errors into one line on stderr: exit 2 for misuse and settings, 1 for the rest, 130 for Ctrl-C."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _terminated)
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
        except _Terminated:
            click.echo("pp1q: terminated", err=True)
            raise
        except OSError as error:  # a full disk, a closed pipe
            click.echo(f"pp1q: {error.strerror or error}", err=True)
            sys.exit(1)

    return wrapper


class _Terminated(SystemExit):
    """SIGTERM ends a command as Ctrl-C does, peers told, with the status a shell expects."""


def _terminated(_number: int, _frame: object) -> None:
    """Writes nothing: a signal may come in the middle of a write to the same stream, and Python allows no second one within."""
    raise _Terminated(128 + signal.SIGTERM)


def setup_logging(verbose: int) -> None:
    """Logs to stderr: for people on a terminal, JSON otherwise. -1 errors only, 0 warnings, 1 info, 2 debug. Called again it
    changes the level of every logger that was made since the first call, bound ones included."""
    global _least
    _least = {-1: logging.ERROR, 0: logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG)
    terminal = sys.stderr.isatty()
    renderer = structlog.dev.ConsoleRenderer(colors=terminal) if terminal else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            _drop_below_level,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),  # which a bound logger keeps: the level is above
        logger_factory=lambda *_names: structlog.PrintLogger(sys.stderr),  # the stderr of the moment a logger is made
        cache_logger_on_first_use=False,
    )


_least = logging.WARNING  # what is below is not logged; the daemon's SIGHUP changes it


def _drop_below_level(_logger: object, name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    if _NUMBERS.get(name, logging.CRITICAL) < _least:
        raise structlog.DropEvent
    return event


class FiniteRange(click.FloatRange):
    """A `click.FloatRange` that takes no NaN, which no comparison refuses, and no infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """See `click.ParamType.convert`."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number.", param, ctx)
        return number


class OneLineCommand(click.Command):
    """A command whose usage errors are one line as well: what is wrong, and where help is."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """See `click.Command.main`; the error's first line is "Usage: ..." there."""
        if not kwargs.get("standalone_mode", True):
            return super().main(*args, **kwargs)
        try:
            status = super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.UsageError as error:
            name = error.ctx.command_path if error.ctx is not None else self.name
            click.echo(f"{name}: {error.format_message()} (see {name} --help)", err=True)
            sys.exit(error.exit_code)
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        except click.Abort:
            click.echo("pp1q: interrupted", err=True)
            sys.exit(130)
        sys.exit(status if isinstance(status, int) else 0)


class StageLine:
    """One line on a terminal that says what is going on; nothing anywhere else."""

    def __init__(self, wanted: bool) -> None:
        self._shown = wanted and sys.stderr.isatty()

    def __call__(self, what: str, number: int, total: int) -> None:
        """`what` is stage `number` (from 0) of `total`."""
        if self._shown:
            click.echo(f"\r\x1b[K[{number + 1}/{total}] {what}", nl=False, err=True)

    def say(self, text: str) -> None:
        """A line that stays, on a terminal."""
        if self._shown:
            click.echo(f"\r\x1b[K{text}", err=True)

    def clear(self) -> None:
        """Takes the line away."""
        if self._shown:
            click.echo("\r\x1b[K", nl=False, err=True)


def open_samples(path: str | None) -> IO[str] | None:
    """The file for `--samples`, opened before anything is measured. Raises `ConfigError`."""
    if path is None:
        return None
    try:
        return open(path, "w", encoding="ascii")
    except OSError as error:
        raise ConfigError(f"can't write samples to {path}: {error.strerror}") from None


def write_samples(sink: IO[str], values_ns: Iterable[int]) -> None:
    """One sample a line in microseconds, with all three decimals, replacing what the file held. Raises `ConfigError`."""
    try:
        sink.seek(0)
        sink.truncate()
        sink.writelines(f"{ns // 1000}.{ns % 1000:03d}\n" for ns in values_ns)
        sink.flush()
    except OSError as error:
        raise ConfigError(f"can't write samples to {sink.name}: {error.strerror}") from None


def check_cpu(cpu: int | None) -> None:
    """Raises `ConfigError` now if this process can't run on `cpu` later."""
    if cpu is not None:
        from ..qualify.stats import pin

        os.sched_setaffinity(0, pin(cpu))
