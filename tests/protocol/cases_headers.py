"""SPEC 2: headers. What a frame must be before any payload byte is looked at; every fault here costs the link."""

from __future__ import annotations

from typing import Final

from pp1q_transport import wire
from pp1q_transport.errors import Reason

from .case import Case, Cost, Life
from .frames import Bend, Frame, Sent, bits, both, claimed, fields, instead, then
from .world import World

R = Reason


def _link(number: str, title: str, reason: Reason, on: int, bend: Bend, **more: object) -> Life:
    return Life(number=number, spec="2", title=title, reason=reason, on=on, bend=bend, cost=Cost.LINK, **more)  # type: ignore[arg-type]


def cut_header(frame: Frame, world: World) -> list[Sent]:
    """Half a header, then the next frame: the stream is out of step."""
    return [frame.encode(world.terms.leader_nonce)[:64], frame]


# --- 2.01..: magic, version, kind, digest, flags, reserved bits: both directions ------------------------------------

FORMAT: Final = (
    _link("2.01", "first magic byte of a REPLY", R.BAD_MAGIC, wire.REPLY, bits(0, 0x01)),
    _link("2.02", "last magic byte of a REPLY", R.BAD_MAGIC, wire.REPLY, bits(3, 0x80)),
    _link("2.03", "second magic byte of a STEP", R.BAD_MAGIC, wire.STEP, bits(1, 0xFF)),
    _link("2.04", "version 3", R.BAD_VERSION, wire.REPLY, fields(version=3)),
    _link("2.05", "version 1 from a greedy peer", R.BAD_VERSION, wire.OPEN, fields(version=1)),
    _link("2.06", "version 0, digest broken too: the version is judged first", R.BAD_VERSION, wire.STEP, bits(4, 2, False)),
    _link("2.07", "kind 0", R.UNKNOWN_KIND, wire.REPLY, bits(5, wire.REPLY)),
    _link("2.08", "kind 20, one past the last", R.UNKNOWN_KIND, wire.COMPLETION, bits(5, wire.COMPLETION ^ 20)),
    _link("2.09", "kind 255 at the leader", R.UNKNOWN_KIND, wire.STEP, bits(5, wire.STEP ^ 255)),
    _link("2.10", "header digest off by one bit", R.HEADER_DIGEST, wire.REPLY, bits(120, 1, False)),
    _link("2.11", "a request bit flipped on the way", R.HEADER_DIGEST, wire.REPLY, bits(24, 1, False)),
    _link("2.12", "a slot bit flipped on the way", R.HEADER_DIGEST, wire.STEP, bits(48, 1, False)),
    _link("2.13", "a payload digest bit flipped on the way", R.HEADER_DIGEST, wire.OPEN, bits(112, 4, False)),
    _link("2.14", "a COMPLETION's status flipped on the way", R.HEADER_DIGEST, wire.COMPLETION, bits(92, 2, False)),
    _link("2.15", "a flag bit in the low byte", R.UNKNOWN_FLAG, wire.REPLY, bits(6, 0x01)),
    _link("2.16", "a flag bit in the high byte", R.UNKNOWN_FLAG, wire.COMMIT, bits(7, 0x80)),
    _link("2.17", "a flag on a CLOSE", R.UNKNOWN_FLAG, wire.CLOSE, fields(flags=2)),
    _link("2.18", "reserved byte 54", R.RESERVED_BITS, wire.REPLY, bits(54, 0x01)),
    _link("2.19", "reserved byte 55", R.RESERVED_BITS, wire.STEP, bits(55, 0x10)),
    _link("2.20", "half a header, then the next frame", R.HEADER_DIGEST, wire.REPLY, cut_header),
)

# --- 2.21..: reserved argument bytes and stray fields of each kind --------------------------------------------------

RESERVED: Final = (
    _link("2.21", "REPLY: reserved argument byte 96", R.RESERVED_BITS, wire.REPLY, bits(96, 1)),
    _link("2.22", "REPLY: reserved argument byte 111", R.RESERVED_BITS, wire.REPLY, bits(111, 0x80)),
    _link("2.23", "COMPLETION: bits above the status", R.RESERVED_BITS, wire.COMPLETION, bits(94, 1)),
    _link("2.24", "COMPLETION: reserved argument byte 104", R.RESERVED_BITS, wire.COMPLETION, bits(104, 1)),
    _link("2.25", "STEP: bits above the budget", R.RESERVED_BITS, wire.STEP, bits(108, 1)),
    _link("2.26", "COMMIT: bits above the source", R.RESERVED_BITS, wire.COMMIT, bits(92, 1)),
    _link("2.27", "COMMIT: reserved argument byte 96", R.RESERVED_BITS, wire.COMMIT, bits(96, 1)),
    _link("2.28", "OPEN: reserved argument byte 100", R.RESERVED_BITS, wire.OPEN, bits(100, 1)),
    _link("2.29", "CLOSE: reserved argument byte 64", R.RESERVED_BITS, wire.CLOSE, bits(64, 1)),
    _link("2.30", "CLOSE: bits above the status", R.RESERVED_BITS, wire.CLOSE, bits(95, 1)),
    _link("2.31", "COMPLETION with a representation", R.RESERVED_BITS, wire.COMPLETION, fields(representation=wire.DENSE)),
    _link("2.32", "COMPLETION with an entry count", R.RESERVED_BITS, wire.COMPLETION, fields(entry_count=1)),
    _link("2.33", "COMPLETION with a payload digest", R.RESERVED_BITS, wire.COMPLETION, bits(112, 1)),
    _link("2.34", "COMPLETION with a payload length", R.RESERVED_BITS, wire.COMPLETION, claimed(64)),
    _link("2.35", "STEP with a shard", R.RESERVED_BITS, wire.STEP, fields(shard=1)),
    _link("2.36", "STEP with a payload length", R.RESERVED_BITS, wire.STEP, claimed(4)),
    _link("2.37", "STEP with an entry count", R.RESERVED_BITS, wire.STEP, fields(entry_count=9)),
    _link("2.38", "OPEN with a slot generation", R.RESERVED_BITS, wire.OPEN, fields(slot_generation=1)),
    _link("2.39", "OPEN with a slot", R.RESERVED_BITS, wire.OPEN, fields(slot=1)),
    _link("2.40", "OPEN with a round", R.RESERVED_BITS, wire.OPEN, fields(round=1)),
    _link("2.41", "OPEN with a depth", R.RESERVED_BITS, wire.OPEN, fields(depth=1)),
    _link("2.42", "COMMIT with a slot", R.RESERVED_BITS, wire.COMMIT, fields(slot=2)),
    _link("2.43", "CLOSE with a position", R.RESERVED_BITS, wire.CLOSE, fields(position=1)),
    _link("2.44", "CLOSE with a round", R.RESERVED_BITS, wire.CLOSE, fields(round=1)),
)

# --- 2.45..: who sent it, to which session, how long ----------------------------------------------------------------

IDENTITY: Final = (
    _link("2.45", "REPLY of an earlier life of the leader", R.BOOT_NONCE, wire.REPLY, fields(boot_nonce=0xDEAD)),
    _link("2.46", "REPLY that carries our own boot nonce", R.BOOT_NONCE, wire.REPLY,
          lambda f, w: fields(boot_nonce=w.terms.receiver_nonce)(f, w)),
    _link("2.47", "COMPLETION of an earlier life of the leader", R.BOOT_NONCE, wire.COMPLETION, fields(boot_nonce=0)),
    _link("2.48", "STEP of an earlier life of the receiver", R.BOOT_NONCE, wire.STEP, fields(boot_nonce=0xBEEF)),
    _link("2.49", "OPEN of an earlier life of the receiver", R.BOOT_NONCE, wire.OPEN, fields(boot_nonce=0xBEEF)),
    _link("2.50", "REPLY of another session", R.SESSION_MISMATCH, wire.REPLY, fields(session=5)),
    _link("2.51", "COMPLETION of session 0", R.SESSION_MISMATCH, wire.COMPLETION, fields(session=0)),
    _link("2.52", "COMMIT of another session", R.SESSION_MISMATCH, wire.COMMIT, fields(session=lambda h: h.session ^ 1)),
    _link("2.53", "STEP of another session, of an earlier life too: the life is judged first", R.BOOT_NONCE, wire.STEP,
          fields(session=1, boot_nonce=1)),
    _link("2.54", "REPLY one byte past the largest payload", R.LENGTH_BOUNDS, wire.REPLY,
          lambda f, w: claimed(w.terms.max_payload + 1)(f, w)),
    _link("2.55", "REPLY that claims 4 GiB", R.LENGTH_BOUNDS, wire.REPLY, claimed(0xFFFFFFFF)),
    _link("2.56", "OPEN that claims 4 GiB", R.LENGTH_BOUNDS, wire.OPEN, claimed(0xFFFFFFFF)),
    _link("2.57", "OPEN one token past the negotiated context", R.LENGTH_BOUNDS, wire.OPEN,
          lambda f, w: both(claimed(4 * w.terms.max_context_tokens + 4),
                            fields(token_count=w.terms.max_context_tokens + 1))(f, w)),
    _link("2.58", "COMMIT that claims 4 GiB", R.LENGTH_BOUNDS, wire.COMMIT, claimed(0xFFFFFFFC)),
    _link("2.59", "REPLY to a slot past the last", R.SLOT_BOUNDS, wire.REPLY, fields(slot=4)),
    _link("2.60", "REPLY to slot 65535", R.SLOT_BOUNDS, wire.REPLY, fields(slot=65535)),
    _link("2.61", "COMPLETION to a slot past the last", R.SLOT_BOUNDS, wire.COMPLETION, fields(slot=4)),
    _link("2.62", "STEP that grants a slot past the last", R.SLOT_BOUNDS, wire.STEP, fields(slot=4)),
    _link("2.63", "STEP that grants slot 65535", R.SLOT_BOUNDS, wire.STEP, fields(slot=65535)),
)  # fmt: skip


# --- 2.64..: known kinds that a role never receives -----------------------------------------------------------------


def _alien(kind: int, payload: bytes = b"") -> Bend:
    """A frame of another kind in place of this one, valid in itself, from the same sender."""

    def make(frame: Frame, world: World) -> Frame:
        side = "leader" if frame.header.boot_nonce == world.terms.leader_nonce else "receiver"
        return world.frame(side, kind, payload)

    return instead(make)


TOKENS = b"\1\0\0\0"
ALIEN: Final = (
    _link("2.64", "OPEN to a receiver", R.UNEXPECTED_KIND, wire.REPLY, _alien(wire.OPEN, TOKENS)),
    _link("2.65", "CLOSE to a receiver", R.UNEXPECTED_KIND, wire.REPLY, _alien(wire.CLOSE)),
    _link("2.66", "STEP to a receiver", R.UNEXPECTED_KIND, wire.REPLY, _alien(wire.STEP)),
    _link("2.67", "COMMIT to a receiver", R.UNEXPECTED_KIND, wire.REPLY, _alien(wire.COMMIT, TOKENS)),
    _link("2.68", "TOKEN to a receiver", R.UNEXPECTED_KIND, wire.REPLY, _alien(wire.TOKEN)),
    _link("2.69", "PROOF to a receiver, after the proof", R.UNEXPECTED_KIND, wire.COMPLETION, _alien(wire.PROOF, bytes(32))),
    _link("2.70", "REPLY to a leader", R.UNEXPECTED_KIND, wire.STEP, _alien(wire.REPLY, TOKENS)),
    _link("2.71", "COMPLETION to a leader", R.UNEXPECTED_KIND, wire.STEP, _alien(wire.COMPLETION)),
    _link("2.72", "TOKEN to a leader", R.UNEXPECTED_KIND, wire.COMMIT, _alien(wire.TOKEN)),
    _link("2.73", "PROOF to a leader, after the proof", R.UNEXPECTED_KIND, wire.OPEN, _alien(wire.PROOF, bytes(32))),
)


# --- 2.74..: RESET, CANCEL and STATUS -------------------------------------------------------------------------------


def _notice(kind: int, status: int, **place: int) -> Bend:
    """A notice about the frame's generation (or `place`) after the frame."""

    def make(frame: Frame, world: World) -> Frame:
        side = "leader" if frame.header.boot_nonce == world.terms.leader_nonce else "receiver"
        h = frame.header
        named = {
            "request": h.request, "request_generation": h.request_generation, "slot": h.slot,
            "slot_generation": h.slot_generation, "round": h.round,
        }  # fmt: skip
        return world.frame(side, kind, subject=wire.STEP, status=status, **(named | place))

    return then(make)


def _life(number: str, title: str, reason: Reason | None, cost: Cost, on: int, bend: Bend, **more: object) -> Life:
    return Life(number=number, spec="2", title=title, reason=reason, on=on, bend=bend, cost=cost, **more)  # type: ignore[arg-type]


NOTICES: Final = (
    _life("2.74", "RESET by the leader discards with its reason", R.OVERLOAD, Cost.PROPOSAL, wire.REPLY,
          _notice(wire.RESET, R.OVERLOAD.code), told=False, counts=(1, 0)),
    _life("2.75", "CANCEL by the leader discards", R.CANCELLED, Cost.PROPOSAL, wire.REPLY,
          _notice(wire.CANCEL, R.CANCELLED.code), told=False, counts=(1, 0)),
    _life("2.76", "STATUS by the leader about a STEP discards", R.LIMITS_MISMATCH, Cost.PROPOSAL, wire.REPLY,
          _notice(wire.STATUS, R.LIMITS_MISMATCH.code), told=False, counts=(1, 0)),
    _life("2.96", "RESET by the leader that names another request", R.REQUEST_MISMATCH, Cost.PROPOSAL, wire.REPLY,
          _notice(wire.RESET, R.OVERLOAD.code, request=99)),
    _link("2.97", "RESET by the leader of a generation never granted", R.SLOT_STATE, wire.REPLY,
          _notice(wire.RESET, R.OVERLOAD.code, slot_generation=1000)),
    _life("2.77", "RESET by the leader of an older generation disturbs nobody", None, Cost.NOTHING, wire.REPLY,
          _notice(wire.RESET, R.CANCELLED.code, slot_generation=0)),
    _life("2.78", "RESET by the leader of a generation that is ready disturbs nobody", None, Cost.NOTHING, wire.COMPLETION,
          _notice(wire.RESET, R.CANCELLED.code)),
    _life("2.79", "STATUS of the link itself only informs", None, Cost.NOTHING, wire.REPLY,
          _notice(wire.STATUS, R.OVERLOAD.code, slot_generation=0)),
    _link("2.80", "RESET by the leader of a slot past the last", R.SLOT_BOUNDS, wire.REPLY,
          _notice(wire.RESET, R.CANCELLED.code, slot=4)),
    _link("2.81", "RESET without a reason", R.RESERVED_BITS, wire.REPLY, _notice(wire.RESET, 0)),
    _link("2.82", "STATUS with a reason this version does not know", R.RESERVED_BITS, wire.REPLY,
          _notice(wire.STATUS, len(Reason) + 1)),
    _life("2.83", "RESET by the receiver: the leader stops, the budget decides", R.CANCELLED, Cost.PROPOSAL, wire.STEP,
          _notice(wire.RESET, R.CANCELLED.code), outcome=R.TIMEOUT, counts=(0, 1)),
    _link("2.84", "CANCEL by the receiver of a slot past the last", R.SLOT_BOUNDS, wire.STEP,
          _notice(wire.CANCEL, R.CANCELLED.code, slot=4)),
    _link("2.85", "CANCEL by the receiver without a reason", R.RESERVED_BITS, wire.STEP, _notice(wire.CANCEL, 0)),
    _life("2.86", "RESET by the receiver of an older generation disturbs nobody", R.CANCELLED, Cost.NOTHING, wire.STEP,
          _notice(wire.RESET, R.CANCELLED.code, slot_generation=0, request=99), counts=(0, 1)),
    _life("2.87", "STATUS by the receiver only informs", None, Cost.NOTHING, wire.STEP, _notice(wire.STATUS, R.OVERLOAD.code)),
    _link("2.88", "STATUS by the receiver with reason 65535", R.RESERVED_BITS, wire.STEP, _notice(wire.STATUS, 65535)),
)  # fmt: skip

CASES: Final[tuple[Case, ...]] = (*FORMAT, *RESERVED, *IDENTITY, *ALIEN, *NOTICES)
