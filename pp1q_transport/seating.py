"""Seats at one control endpoint: several engines, one for each member of a rank group, behind a single listener.

Between `Forming`, which forms sessions for any of them, and the engines, each of which knows its own seat alone. Moves no frames
and decides nothing about a session. SPEC sections 2 and 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .forming import Event, Formed, Forming

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Set


class Seats:
    """A `Forming` that is shared. Whoever polls moves it for all; what is not the caller's waits for its own engine."""

    def __init__(self, forming: Forming, seats: Iterable[int]) -> None:
        self.forming = forming
        self._events: dict[int, list[Event]] = {seat: [] for seat in seats}
        self._busy: set[int] = set()

    def seat(self, number: int) -> Seat:
        """The place of one engine."""
        return Seat(self, number)

    def poll(self, seat: int, now_ns: int, busy: bool) -> list[Event]:
        """One pass; what happened to `seat`."""
        (self._busy.add if busy else self._busy.discard)(seat)
        # A session that was formed and not yet taken up has its seat already.
        formed = {number for number, events in self._events.items() if any(isinstance(event, Formed) for event in events)}
        for event in self.forming.poll(now_ns, self._busy | formed):
            number = self.forming.seat_for(event.agreement) if isinstance(event, Formed) else event.seat
            self._events[number].append(event)
        mine = self._events[seat][:]
        if any(isinstance(event, Formed) for event in mine):
            self._busy.add(seat)  # from now on, not from its engine's next look: what its peer says meanwhile is for it
        self._events[seat].clear()
        return mine

    def close(self) -> None:
        """Closes the endpoint. The engines' own ends come first."""
        for events in self._events.values():
            for event in events:
                if isinstance(event, Formed):
                    event.joined.close()
        self.forming.close()


class Seat:
    """One engine's share (see `engine.Forms`). Its backoff is nobody's: a listener waits to be found."""

    def __init__(self, seats: Seats, number: int) -> None:
        self._seats = seats
        self._number = number

    @property
    def endpoint(self) -> str:
        """The control endpoint in use."""
        return self._seats.forming.endpoint

    @property
    def descriptors_changed(self) -> tuple[int, int]:
        """See `Forming.descriptors_changed`."""
        return self._seats.forming.descriptors_changed

    def descriptors(self) -> list[int]:
        """See `Forming.descriptors`."""
        return self._seats.forming.descriptors()

    def poll(self, now_ns: int, busy: Set[int]) -> list[Event]:
        """See `Forming.poll`, for this seat alone."""
        return self._seats.poll(self._number, now_ns, bool(busy))

    def wait(self, timeout_ns: int) -> None:
        """See `Forming.wait`."""
        self._seats.forming.wait(timeout_ns)

    def say(self, kind: str, body: Mapping[str, object]) -> None:
        """See `Forming.say`."""
        self._seats.forming.say(kind, body, self._number)

    def goodbye(self) -> None:
        """See `Forming.goodbye`."""
        self._seats.forming.goodbye(self._number)

    def back_off(self, now_ns: int) -> None:
        """Nothing to do: see the class."""

    def settled(self) -> None:
        """Nothing to do: see the class."""

    def close(self) -> None:
        """The endpoint is the seats' owner's to close."""
