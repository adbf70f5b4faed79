"""A device that is none: memory of its own, copies that end when the test says, after some looks, in a thread, or never."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray


class FakeCopy:
    """One copy: `data` is the device's side. It happens only when the device lets it."""

    def __init__(self, what: Any, view: NDArray[Any], up: bool, after: int | None = None) -> None:
        self.what = what
        self.after = after
        self.view = view
        self.up = up
        self.looks = 0
        self.over = threading.Event()
        self.data: NDArray[Any] = np.zeros_like(view) if up else np.asarray(what)
        self.ended_ns = 0

    def happen(self) -> None:
        if self.up:
            self.data = self.view.copy()
        else:
            self.view[:] = self.data
        self.ended_ns = time.monotonic_ns()
        self.over.set()


class FakeDevice:
    """A `CopyStage`. `after` looks each copy is over (None: never by itself). `up`: host to device."""

    def __init__(self, after: int | None = 3, up: bool = True, fails: str = "") -> None:
        self.after = after
        self.up = up
        self.fails = fails
        self.copies: list[FakeCopy] = []
        self.at_look: Callable[[FakeCopy], None] = lambda copy: None

    def start(self, what: Any, view: NDArray[Any]) -> FakeCopy:
        if self.fails == "start" and len(self.copies) >= 1:
            raise ZeroDivisionError("start")
        copy = FakeCopy(what, view, self.up, self.after)
        if not self.up:
            view[:] = np.nan if view.dtype.kind == "f" else 0  # what lies there before it is over is no row
        self.copies.append(copy)
        self.started(copy)
        return copy

    def started(self, copy: FakeCopy) -> None:
        """For a device that goes on by itself."""

    def done(self, token: FakeCopy) -> bool:
        self.at_look(token)
        if token.over.is_set():
            return True
        token.looks += 1
        if self.fails == "done" and token is self.copies[0]:
            raise ZeroDivisionError("done")
        if token.after is not None and token.looks >= token.after:
            token.happen()
        return token.over.is_set()

    def wait(self, token: FakeCopy, timeout_ns: int) -> None:
        if self.fails == "wait":
            raise ZeroDivisionError("wait")
        token.over.wait(timeout_ns / 1e9)

    @property
    def running(self) -> list[FakeCopy]:
        return [copy for copy in self.copies if not copy.over.is_set()]

    def finish(self) -> None:
        """Everything that runs is over."""
        for copy in self.running:
            copy.happen()


class ThreadedDevice(FakeDevice):
    """Copies happen in a thread, some milliseconds later."""

    def __init__(self, up: bool = True, delay_s: float = 0.003) -> None:
        super().__init__(None, up)
        self.delay_s = delay_s
        self.threads: list[threading.Thread] = []

    def started(self, copy: FakeCopy) -> None:
        thread = threading.Timer(self.delay_s, copy.happen)
        self.threads.append(thread)
        thread.start()

    def join(self) -> None:
        for thread in self.threads:
            thread.join()
