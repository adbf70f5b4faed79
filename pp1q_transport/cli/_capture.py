"""The capture options that several commands share, and the capture they ask for.

Between click and `capture.recorder`, which is loaded only when a capture is wanted.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ..errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ..capture.recorder import Capture


@dataclass(frozen=True, slots=True)
class CaptureChoice:
    """What the options said. `path` None: no capture."""

    path: str | None
    mib: int
    redact: bool

    @contextmanager
    def opened(self) -> Iterator[Capture | None]:
        """The capture, until the block ends; None when none is wanted. Raises `ConfigError`."""
        if self.path is None:
            yield None
            return
        from ..capture.recorder import Capture

        capture = Capture(self.path, self.mib << 20, redact=self.redact)
        try:
            yield capture
        finally:
            capture.close()
            if capture.failed or capture.dropped:
                why = capture.failed or "the disk was too slow"
                click.echo(f"pp1q: the capture {self.path} is not whole, {capture.dropped} packets are missing: {why}", err=True)

    def words(self) -> list[str]:
        """The options again, for a command that this one starts."""
        if self.path is None:
            return []
        return [f"--capture={self.path}", f"--capture-mib={self.mib}", *(["--redact"] if self.redact else [])]

    def beside(self, path: Path) -> CaptureChoice:
        """The same, into another file."""
        return CaptureChoice(str(path), self.mib, self.redact)


def capture_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options to a command; its function gets them as one `capture` (`CaptureChoice`)."""

    @click.option("--capture", "capture_path", type=click.Path(), metavar="FILE", help="Write every frame to a pcapng file.")
    @click.option("--capture-mib", type=click.IntRange(1, 1 << 20), default=256, metavar="N",
                  help="Begin another file past this size; the last four are kept.")  # fmt: skip
    @click.option("--redact", is_flag=True, help="Leave tokens and q out of the capture (it can't be replayed then).")
    @functools.wraps(function)
    def wrapper(*args: Any, capture_path: str | None, capture_mib: int, redact: bool, **kwargs: Any) -> Any:
        if redact and capture_path is None:
            raise ConfigError("--redact is for a capture: give --capture FILE as well")
        return function(*args, capture=CaptureChoice(capture_path, capture_mib, redact), **kwargs)

    return wrapper
