"""Mutations: one frame of an honest stream made wrong, repeated, replaced or misplaced; and the digests made right again.

Between `trial` and `byspec`. Random alone decides what befalls whom: a `random.Random` comes in. Judges nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from . import byspec
from .byspec import COMPLETION, HEADER, REPLY

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

KINDS: Final = ("flip", "truncate", "swap", "duplicate", "stale", "reorder", "field")
_PLACED: Final = ("boot_nonce", "session", "request", "slot_generation", "request_generation", "round", "slot", "depth")
_LENGTH: Final = byspec.COMMON["payload_length"]
_POSITION: Final = byspec.COMMON["position"]
_SLOT: Final = byspec.COMMON["slot"]
# As FP32: zero, one, 2^-24, -0.0, -1, infinity, NaN, the smallest of all; as int32: the extremes.
_WORDS: Final = (0, 0x3F800000, 0x33800000, 0x80000000, 0xBF800000, 0x7F800000, 0x7FC00000, 1, 0x7FFFFFFF, 0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class Mutated:
    """A stream after a mutation: its frames, and the index of the one that is not as it was (or where it was)."""

    frames: list[bytes]
    index: int


class Mutator:
    """Makes mutations of one kind after the other. `others` are frames of other proposals and sessions."""

    def __init__(self, noise: random.Random, resign: bool) -> None:
        self._noise = noise
        self._resign = resign
        self._how: dict[str, Callable[[list[bytes], int, list[bytes]], Mutated]] = {
            "flip": self._flip,
            "truncate": self._truncate,
            "swap": self._swap,
            "duplicate": self._duplicate,
            "stale": self._stale,
            "reorder": self._reorder,
            "field": self._field,
        }

    def mutate(self, kind: str, frames: list[bytes], others: list[bytes], leader_nonce: int) -> Mutated:
        """`frames` with one mutation of `kind`, signed anew if that is wanted. Never the same stream."""
        index = self._noise.randrange(len(frames))
        done = self._signed(self._how[kind](frames, index, others), leader_nonce)
        while done.frames == frames:  # a field that had that value, a digest that was signed back
            done = self._signed(self._flip(frames, index, others), leader_nonce)
        return done

    # ---- the kinds ----------------------------------------------------------------------------------------------

    def _flip(self, frames: list[bytes], index: int, _others: list[bytes]) -> Mutated:
        """One to three bits, of the header as often as of the payload."""
        frame = bytearray(frames[index])
        for _ in range(self._noise.choice((1, 1, 2, 3))):
            low, high = (HEADER, len(frame)) if len(frame) > HEADER and self._noise.random() < 0.5 else (0, HEADER)
            frame[self._noise.randrange(low, high)] ^= 1 << self._noise.randrange(8)
        return _with(frames, index, frame)

    def _truncate(self, frames: list[bytes], index: int, _others: list[bytes]) -> Mutated:
        """Its end is missing; what follows takes its place, unless it is the last (or, signed, says so itself)."""
        frame = bytearray(frames[index])
        del frame[self._noise.randrange(len(frame)) :]
        if self._resign and len(frame) >= HEADER and self._noise.random() < 0.5:
            del frame[len(frame) - (len(frame) - HEADER) % 8 :]
            frame[56:60] = (len(frame) - HEADER).to_bytes(4, "little")
            if self._noise.random() < 0.5:
                frame[60:64] = ((len(frame) - HEADER) // 8).to_bytes(4, "little")
        return _with(frames, index, frame)

    def _swap(self, frames: list[bytes], index: int, others: list[bytes]) -> Mutated:
        """Another frame's payload or header field, or two words of its own payload the other way round."""
        frame = bytearray(frames[index])
        how = self._noise.randrange(3)
        if how == 0 and len(frame) > HEADER:
            first, second = (HEADER + 4 * self._noise.randrange((len(frame) - HEADER) // 4) for _ in range(2))
            frame[first : first + 4], frame[second : second + 4] = frame[second : second + 4], frame[first : first + 4]
            return _with(frames, index, frame)
        other = self._noise.choice(frames if self._noise.random() < 0.5 or not others else others)
        if how == 1 or len(other) == HEADER or len(frame) == HEADER:
            at, size = self._noise.choice(_places(frame))
            frame[at : at + size] = other[at : at + size]
            return _with(frames, index, frame)
        frame[HEADER:] = other[HEADER:]
        if self._noise.random() < 0.75:  # with the length and count that belong to it
            frame[56:64] = other[56:64]
            if self._noise.random() < 0.5:
                frame[64:68] = other[64:68]  # and its token
        return _with(frames, index, frame)

    def _duplicate(self, frames: list[bytes], index: int, _others: list[bytes]) -> Mutated:
        """It comes a second time, then or later."""
        at = self._noise.randrange(index + 1, len(frames) + 1)
        return Mutated([*frames[:at], frames[index], *frames[at:]], at)

    def _stale(self, frames: list[bytes], index: int, others: list[bytes]) -> Mutated:
        """A frame of another proposal or session comes as well or instead; signed, it may say that it belongs here."""
        if not others:
            return self._duplicate(frames, index, others)
        late = bytearray(self._noise.choice(others))
        if self._resign and self._noise.random() < 0.75:
            for name in _PLACED:
                if self._noise.random() < 0.9:
                    at, size = byspec.COMMON[name]
                    late[at : at + size] = frames[index][at : at + size]
            if byspec.frame_kind(late) == byspec.frame_kind(frames[index]) and self._noise.random() < 0.8:
                late[44:48] = frames[index][44:48]
                late[72:80] = frames[index][72:80]
        rest = index + (1 if self._noise.random() < 0.5 else 0)
        return Mutated([*frames[:index], bytes(late), *frames[rest:]], index)

    def _reorder(self, frames: list[bytes], index: int, _others: list[bytes]) -> Mutated:
        """It comes earlier or later than it should."""
        moved = [*frames[:index], *frames[index + 1 :]]
        at = self._noise.randrange(len(frames))
        moved.insert(at, frames[index])
        return Mutated(moved, at)

    def _field(self, frames: list[bytes], index: int, others: list[bytes]) -> Mutated:
        """A header field, or a word of the payload, has another value: an extreme, a neighbour, noise, or another one's."""
        frame = bytearray(frames[index])
        if len(frame) > HEADER and self._noise.random() < 0.25:
            return _with(frames, index, self._word(frame))
        at, size = self._noise.choice(_places(frame))
        value, top = int.from_bytes(frame[at : at + size], "little"), (1 << 8 * size) - 1
        other = self._noise.choice(others or frames)
        news = (0, top, value + 1, value - 1, self._noise.randrange(top + 1), value ^ (1 << self._noise.randrange(8 * size)),
                int.from_bytes(other[at : at + size], "little"))  # fmt: skip
        frame[at : at + size] = (self._noise.choice(news) & top).to_bytes(size, "little")
        return _with(frames, index, frame)

    def _word(self, frame: bytearray) -> bytearray:
        """One word of the payload, a value of q or an ID, is another one."""
        words = (len(frame) - HEADER) // 4
        at, near = (HEADER + 4 * self._noise.randrange(words) for _ in range(2))
        value = int.from_bytes(frame[at : at + 4], "little")
        news = (*_WORDS, value + 1, value - 1, int.from_bytes(frame[near : near + 4], "little"))
        frame[at : at + 4] = (self._noise.choice(news) & 0xFFFFFFFF).to_bytes(4, "little")
        return frame

    # ---- digests ------------------------------------------------------------------------------------------------

    def _signed(self, done: Mutated, leader_nonce: int) -> Mutated:
        """If that is wanted: every digest of the frame is right again, and usually those of the COMPLETIONs over it."""
        frames = list(done.frames)
        frame = bytearray(frames[done.index])
        if not self._resign or len(frame) < HEADER:
            return done
        byspec.sign(frame, leader_nonce, payload=frame[5] == REPLY)
        frames[done.index] = bytes(frame)
        if self._noise.random() < 0.75:
            for index, other in enumerate(frames):
                if byspec.frame_kind(other) == COMPLETION and (index != done.index or self._noise.random() < 0.25):
                    frames[index] = _completed(bytearray(other), frames[:index])
        return Mutated(frames, done.index)


def _with(frames: list[bytes], index: int, frame: bytearray) -> Mutated:
    return Mutated([*frames[:index], bytes(frame), *frames[index + 1 :]], index)


def _places(frame: bytearray) -> list[tuple[int, int]]:
    return _PLACES.get(byspec.frame_kind(frame), _PLACES[0])


_PLACES: Final = {
    0: list(byspec.COMMON.values()),
    **{kind: [*byspec.COMMON.values(), *places.values()] for kind, places in byspec.ARGUMENTS.items()},
}


def _completed(frame: bytearray, before: list[bytes]) -> bytes:
    """A COMPLETION over the rows that came before it for its slot generation, as a sender that made them would say."""
    rows: dict[int, tuple[int, int, int]] = {}
    for other in before:
        if byspec.frame_kind(other) == REPLY and other[32:36] == frame[32:36] and other[48:50] == frame[48:50]:
            position = byspec.number(other, _POSITION)
            rows.setdefault(position, (position, byspec.number(other, _LENGTH), byspec.number(other, (112, 8))))
    ordered = [rows[position] for position in sorted(rows)]
    frame[64:72] = sum(row[1] for row in ordered).to_bytes(8, "little")
    frame[80:88] = byspec.reply_digest(ordered).to_bytes(8, "little")
    byspec.sign(frame, 0, payload=False)
    return bytes(frame)
