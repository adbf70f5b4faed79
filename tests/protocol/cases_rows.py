"""SPEC 4: rows and completions. A payload fault costs one proposal; a generation that was never granted costs the link."""

from __future__ import annotations

from typing import Final

from pp1q_transport import wire
from pp1q_transport.errors import Reason

from .case import Case, Cost, Life
from .frames import (
    Bend,
    Entries,
    Value,
    both,
    claimed,
    dense,
    dropped,
    fields,
    heavier,
    moved,
    payload_bit,
    resized,
    signed_as,
    sparse,
    token_of_weight,
    twice,
)

R = Reason
SPARSE: Final = {"representation": wire.SPARSE}
PADDED: Final = {"vocab": 100}  # 400 bytes of values, 48 of padding

NAN, INF, MINUS_INF, MINUS_ZERO = 0x7FC00000, 0x7F800000, 0xFF800000, 0x80000000
UNIT, MINUS_UNIT, HALF_UNIT, DENORMAL = 0x33800000, 0xB3800000, 0x33000000, 1
ONE, ABOVE_ONE, TWO = 0x3F800000, 0x3F800001, 0x40000000


def _row(number: str, title: str, reason: Reason, bend: Bend, on: int = wire.REPLY, **more: object) -> Life:
    more.setdefault("cost", Cost.PROPOSAL)
    return Life(number=number, spec="4", title=title, reason=reason, on=on, bend=bend, **more)  # type: ignore[arg-type]


def _sparse(number: str, title: str, reason: Reason, bend: Bend, **more: object) -> Life:
    return _row(number, title, reason, bend, step=more.pop("step", SPARSE), **more)


def _set(index: int, identity: int | None = None, q: int | None = None) -> Bend:
    """Sets one entry of a sparse row."""

    def change(entries: Entries) -> Entries:
        old_id, old_q = entries[index]
        entries[index] = (old_id if identity is None else identity, old_q if q is None else q)
        return entries

    return sparse(change)


def _place(slots: int = 0, generations: int = 0) -> dict[str, Value]:
    """Another place: the slot so many further on (of the world's four), the slot generation so many later."""
    return {"slot": lambda h: (h.slot + slots) % 4, "slot_generation": lambda h: h.slot_generation + generations}


# --- 4.001..: what a row's header claims ----------------------------------------------------------------------------

CLAIMS: Final = (
    _row("4.001", "row names another request", R.REQUEST_MISMATCH, fields(request=lambda h: h.request + 98)),
    _row("4.002", "row of a later request generation", R.GENERATION_STALE, fields(request_generation=1), nth=2, counts=(2, 1)),
    _row("4.003", "row of another round", R.ROUND_MISMATCH, fields(round=1)),
    _row("4.004", "valid row moved to another round", R.ROUND_MISMATCH, moved(round=7)),
    _row("4.005", "row of depth 0", R.DEPTH_MISMATCH, fields(depth=0)),
    _row("4.006", "row of a deeper proposal", R.DEPTH_MISMATCH, fields(depth=4)),
    _row("4.007", "row of another context", R.CONTEXT_MISMATCH, fields(context=lambda h: h.context ^ 1)),
    _row("4.008", "row at the anchor itself", R.POSITION_BOUNDS, fields(position=2)),
    _row("4.009", "row one past the last position", R.POSITION_BOUNDS, fields(position=6)),
    _row("4.010", "row at position 0xFFFFFFFF", R.POSITION_BOUNDS, fields(position=0xFFFFFFFF)),
    _row("4.011", "valid row at its neighbour's position", R.PAYLOAD_DIGEST, moved(position=4)),
    _row("4.012", "row repeated", R.POSITION_DUPLICATE, twice),
    _row("4.013", "last row repeated", R.POSITION_DUPLICATE, twice, nth=2),
    _row("4.014", "row claims the position before it", R.POSITION_DUPLICATE, fields(position=3), nth=1),
    _row("4.015", "row of another vocabulary shard", R.ID_RANGE, fields(shard=1)),
    _row("4.016", "row starts at ID 32", R.ID_RANGE, fields(first_id=32)),
    _row("4.017", "row ends before the vocabulary does", R.ID_RANGE, fields(end_id=63)),
    _row("4.018", "row ends past the vocabulary", R.ID_RANGE, fields(end_id=65)),
    _row("4.019", "shard mass below 2^24", R.MASS, fields(shard_mass=(1 << 24) - 1)),
    _row("4.020", "mass before the only shard", R.MASS, fields(mass_before=1)),
    _row("4.021", "draw counter other than 0", R.DRAW_MISMATCH, fields(draw_counter=1)),
    _row("4.022", "sparse row for a dense STEP", R.REPRESENTATION, fields(representation=wire.SPARSE)),
    _row("4.023", "representation 0", R.REPRESENTATION, fields(representation=0)),
    _row("4.024", "representation 3", R.REPRESENTATION, fields(representation=3)),
    _sparse("4.025", "dense row for a sparse STEP", R.REPRESENTATION, fields(representation=wire.DENSE)),
    _row("4.026", "dense row of one entry too few", R.SUPPORT_BOUNDS, fields(entry_count=63)),
    _row("4.027", "dense row of one entry too many", R.SUPPORT_BOUNDS, fields(entry_count=65)),
    _row("4.028", "dense row of 0 entries", R.SUPPORT_BOUNDS, fields(entry_count=0)),
    _row("4.029", "dense row of one value too few", R.LENGTH_BOUNDS, resized(-4)),
    _row("4.030", "dense row of one value too many", R.LENGTH_BOUNDS, resized(4)),
    _row("4.031", "dense row of no bytes", R.LENGTH_BOUNDS, resized(-256)),
    _row("4.032", "dense row without its padding", R.LENGTH_BOUNDS, resized(-48), world=PADDED),
    _sparse("4.033", "sparse row of no entries", R.SUPPORT_BOUNDS, sparse(lambda e: [])),
    _sparse("4.034", "sparse row of one entry more than k", R.SUPPORT_BOUNDS, sparse(lambda e: [*e, (63, UNIT)])),
    _sparse("4.035", "sparse row within the negotiated support but above the STEP's k", R.SUPPORT_BOUNDS,
            sparse(lambda e: [*e, (63, UNIT)]), step={**SPARSE, "support": 4}),
    _sparse("4.036", "sparse row shorter than its entries", R.LENGTH_BOUNDS, resized(-8)),
    _sparse("4.037", "sparse row longer than its entries", R.LENGTH_BOUNDS, resized(1)),
    _row("4.038", "token -1", R.ID_RANGE, fields(token=-1)),
    _row("4.039", "token one past the vocabulary", R.ID_RANGE, fields(token=64)),
    _row("4.040", "token in the padding", R.ID_RANGE, fields(token=100), world=PADDED),
    _sparse("4.041", "sparse row with the token past the vocabulary", R.ID_RANGE, fields(token=0x7FFFFFFF)),
)  # fmt: skip

# --- 4.042..: a payload signed for another place, the header being right --------------------------------------------

PLACES: Final = (
    _row("4.042", "digest of another kind", R.PAYLOAD_DIGEST, signed_as(kind=wire.TOKEN)),
    _row("4.043", "digest of an earlier life of the leader", R.PAYLOAD_DIGEST, signed_as(nonce=0xDEAD)),
    _row("4.044", "digest of another session", R.PAYLOAD_DIGEST, signed_as(session=9)),
    _row("4.045", "digest of another request", R.PAYLOAD_DIGEST, signed_as(request=2)),
    _row("4.046", "digest of another shard", R.PAYLOAD_DIGEST, signed_as(shard=1)),
    _row("4.047", "digest of another slot", R.PAYLOAD_DIGEST, signed_as(**_place(1))),
    _row("4.048", "digest of another slot generation", R.PAYLOAD_DIGEST, signed_as(**_place(0, 1))),
    _row("4.049", "digest of another request generation", R.PAYLOAD_DIGEST, signed_as(request_generation=1)),
    _row("4.050", "digest of another round", R.PAYLOAD_DIGEST, signed_as(round=1)),
    _row("4.051", "digest of another position", R.PAYLOAD_DIGEST, signed_as(position=4)),
    _sparse("4.052", "sparse row with the digest of another slot", R.PAYLOAD_DIGEST, signed_as(**_place(1))),
    _sparse("4.053", "sparse row with the digest of another position", R.PAYLOAD_DIGEST, signed_as(position=5)),
    _row("4.054", "first payload bit flipped", R.PAYLOAD_DIGEST, payload_bit(0)),
    _row("4.055", "last payload bit flipped", R.PAYLOAD_DIGEST, payload_bit(255, 0x80)),
    _row("4.056", "padding bit flipped", R.PAYLOAD_DIGEST, payload_bit(447, 0x80), world=PADDED),
    _row("4.057", "payload bit flipped in the last row", R.PAYLOAD_DIGEST, payload_bit(100), nth=2),
    _sparse("4.058", "sparse q bit flipped", R.PAYLOAD_DIGEST, payload_bit(3)),
    _sparse("4.059", "sparse ID bit flipped", R.PAYLOAD_DIGEST, payload_bit(63, 2)),
    _row("4.060", "NaN under a wrong digest: the digest is judged first", R.PAYLOAD_DIGEST,
         both(dense(0, NAN), moved())),
)  # fmt: skip

# --- 4.061..: values, with right digests ----------------------------------------------------------------------------

DENSE_VALUES: Final = (
    _row("4.061", "dense NaN", R.NONFINITE, dense(0, NAN)),
    _row("4.062", "dense signalling NaN in the last place", R.NONFINITE, dense(63, 0x7F800001)),
    _row("4.063", "dense +inf", R.NONFINITE, dense(31, INF)),
    _row("4.064", "dense -inf is not finite first", R.NONFINITE, dense(32, MINUS_INF)),
    _row("4.065", "dense -2^-24", R.NEGATIVE, dense(5, MINUS_UNIT)),
    _row("4.066", "dense -0.0", R.NEGATIVE, dense(0, MINUS_ZERO)),
    _row("4.067", "dense -0.0 in the last place", R.NEGATIVE, dense(63, MINUS_ZERO)),
    _row("4.068", "dense 2^-25", R.NONDYADIC, dense(1, HALF_UNIT)),
    _row("4.069", "dense denormal", R.NONDYADIC, dense(2, DENORMAL)),
    _row("4.070", "dense value between two units", R.NONDYADIC, dense(3, 0x3F000001 - 0x00800000)),
    _row("4.071", "dense 1 + 2^-23", R.NONDYADIC, dense(4, ABOVE_ONE)),
    _row("4.072", "dense 2.0", R.NONDYADIC, dense(4, TWO)),
    _row("4.073", "dense 1.0 beside others", R.MASS, dense(4, ONE)),
    _row("4.074", "dense sum 2^24 + 1", R.MASS, heavier(1)),
    _row("4.075", "dense sum 2^24 - 1", R.MASS, heavier(-1)),
    _row("4.076", "dense row of zeros", R.MASS, lambda f, w: f.payload.__setitem__(slice(None), bytes(256))),
    _row("4.077", "dense sum that wraps u32: every value is 1", R.MASS,
         lambda f, w: f.payload.__setitem__(slice(None), bytes((0, 0, 0x80, 0x3F)) * 64)),
    _row("4.078", "dense sum of the last row", R.MASS, heavier(1), nth=2),
    _row("4.079", "value in the first place of the padding", R.PADDING_NONZERO, dense(100, UNIT), world=PADDED),
    _row("4.080", "-0.0 in the last place of the padding", R.PADDING_NONZERO, dense(111, MINUS_ZERO), world=PADDED),
    _row("4.081", "NaN in the padding", R.PADDING_NONZERO, dense(105, NAN), world=PADDED),
    _row("4.082", "dense token of q = 0", R.ZERO_Q_TOKEN, token_of_weight(zero=True)),
    _row("4.083", "dense token of q = 0 without the draw proof", R.ZERO_Q_TOKEN, token_of_weight(zero=True),
         world={"draw_proof": False}),
    _row("4.084", "dense token that q does not yield", R.DRAW_MISMATCH, token_of_weight(zero=False)),
    _row("4.085", "dense token that q does not yield, last row", R.DRAW_MISMATCH, token_of_weight(zero=False), nth=2),
)  # fmt: skip

SPARSE_VALUES: Final = (
    _sparse("4.086", "sparse ID -1", R.ID_RANGE, _set(0, identity=-1)),
    _sparse("4.087", "sparse ID one past the vocabulary", R.ID_RANGE, _set(7, identity=64)),
    _sparse("4.088", "sparse ID 2^31 - 1", R.ID_RANGE, _set(7, identity=0x7FFFFFFF)),
    _sparse("4.089", "sparse IDs swapped", R.ID_ORDER, sparse(lambda e: [e[1], e[0], *e[2:]])),
    _sparse("4.090", "sparse IDs descending", R.ID_ORDER, sparse(lambda e: e[::-1])),
    _sparse("4.091", "sparse ID twice, side by side", R.ID_DUPLICATE, lambda f, w: _set(1, identity=_first_id(f))(f, w)),
    _sparse("4.092", "sparse NaN", R.NONFINITE, _set(0, q=NAN)),
    _sparse("4.093", "sparse +inf in the last entry", R.NONFINITE, _set(7, q=INF)),
    _sparse("4.094", "sparse -2^-24", R.NEGATIVE, _set(3, q=MINUS_UNIT)),
    _sparse("4.095", "sparse -0.0", R.NEGATIVE, _set(0, q=MINUS_ZERO)),
    _sparse("4.096", "sparse 2^-25", R.NONDYADIC, _set(0, q=HALF_UNIT)),
    _sparse("4.097", "sparse 2.0", R.NONDYADIC, _set(5, q=TWO)),
    _sparse("4.098", "sparse denormal", R.NONDYADIC, _set(5, q=DENORMAL)),
    _sparse("4.099", "sparse zero entry", R.ZERO_ENTRY, _set(2, q=0)),
    _sparse("4.100", "sparse sum 2^24 + 1", R.MASS, heavier(1)),
    _sparse("4.101", "sparse sum 2^24 - 1", R.MASS, heavier(-1)),
    _sparse("4.102", "sparse entry missing", R.MASS, sparse(lambda e: e[:-1])),
    _sparse("4.103", "sparse token outside the support", R.ZERO_Q_TOKEN, token_of_weight(zero=True)),
    _sparse("4.104", "sparse token that q does not yield", R.DRAW_MISMATCH, token_of_weight(zero=False)),
    _sparse("4.105", "sparse token outside the support without the draw proof", R.ZERO_Q_TOKEN,
            token_of_weight(zero=True), world={"draw_proof": False}),
)  # fmt: skip


def _first_id(frame: object) -> int:
    payload, n = frame.payload, frame.header.entry_count  # type: ignore[attr-defined]
    return int.from_bytes(payload[4 * n : 4 * n + 4], "little", signed=True)


# --- 4.106..: completions -------------------------------------------------------------------------------------------


def _completion(number: str, title: str, reason: Reason, bend: Bend, **more: object) -> Life:
    return _row(number, title, reason, bend, wire.COMPLETION, **more)


COMPLETIONS: Final = (
    _completion("4.106", "completion names another request", R.REQUEST_MISMATCH, fields(request=77)),
    _completion("4.107", "completion of another request generation", R.GENERATION_STALE, fields(request_generation=9)),
    _completion("4.108", "completion of another round", R.ROUND_MISMATCH, fields(round=3)),
    _completion("4.109", "completion of another depth", R.DEPTH_MISMATCH, fields(depth=2)),
    _completion("4.110", "completion of a shard", R.ID_RANGE, fields(shard=1)),
    _completion("4.111", "completion of another context", R.CONTEXT_MISMATCH, fields(context=0)),
    _completion("4.112", "completion of another anchor", R.POSITION_BOUNDS, fields(position=3)),
    _completion("4.113", "completion of one position less", R.INCOMPLETE, fields(positions=2)),
    _completion("4.114", "completion of one position more", R.INCOMPLETE, fields(positions=4)),
    _completion("4.115", "completion one byte too long", R.REPLY_SIZE, fields(reply_size=lambda h: h.reply_size + 1)),
    _completion("4.116", "completion of 0 bytes", R.REPLY_SIZE, fields(reply_size=0)),
    _completion("4.117", "completion size that wraps u32", R.REPLY_SIZE,
                fields(reply_size=lambda h: h.reply_size + (1 << 32))),
    _completion("4.118", "completion digest off by one bit", R.PAYLOAD_DIGEST,
                fields(reply_digest=lambda h: h.reply_digest ^ (1 << 63))),
    _completion("4.119", "completion with the draft's refusal", R.INVALID_WEIGHTS, fields(status=R.INVALID_WEIGHTS.code)),
    _completion("4.120", "completion with the draft's overload", R.OVERLOAD, fields(status=R.OVERLOAD.code)),
    _completion("4.121", "completion with a reason this version does not know", R.INCOMPLETE, fields(status=60000)),
    _completion("4.122", "completion lost", R.TIMEOUT, dropped),
    _completion("4.123", "completion repeated", R.GENERATION_DUPLICATE, twice, cost=Cost.NOTHING),
    _completion("4.124", "completion of an older slot generation", R.GENERATION_STALE, fields(slot_generation=0),
                outcome=R.TIMEOUT, counts=(1, 0)),
    _completion("4.125", "completion of a slot generation that was never granted", R.SLOT_STATE,
                fields(**_place(0, 1)), cost=Cost.LINK),
    _completion("4.126", "completion for a slot that is free", R.SLOT_STATE, fields(**_place(2, 9)), cost=Cost.LINK),
    _row("4.127", "first row lost", R.INCOMPLETE, dropped),
    _row("4.128", "last row lost", R.INCOMPLETE, dropped, nth=2),
    _row("4.129", "row of an older slot generation lands nowhere", R.GENERATION_STALE, fields(slot_generation=0),
         outcome=R.INCOMPLETE, counts=(1, 0)),
    _row("4.130", "row of a slot generation that was never granted", R.SLOT_STATE, fields(**_place(0, 1)),
         cost=Cost.LINK),
    _row("4.131", "row for a slot that is free", R.SLOT_STATE, fields(**_place(1, 9)), cost=Cost.LINK),
    _row("4.132", "row of the last slot generation there is", R.SLOT_STATE, fields(slot_generation=0xFFFFFFFF),
         cost=Cost.LINK),
    _row("4.133", "row cut short: what follows is taken for its payload", R.BAD_MAGIC,
         lambda f, w: setattr(f, "cut", 128 + 100), cost=Cost.LINK),
    _row("4.134", "row claims less than it carries: the rest is no header", R.BAD_MAGIC, claimed(252), cost=Cost.LINK),
)  # fmt: skip

# --- 4.135..: what is right passes ----------------------------------------------------------------------------------


def _right(number: str, title: str, **more: object) -> Life:
    return _row(number, title, None, lambda f, w: None, cost=Cost.NOTHING, **more)  # type: ignore[arg-type]


RIGHT: Final = (
    _right("4.135", "an honest dense life"),
    _right("4.136", "an honest sparse life", step=SPARSE),
    _right("4.137", "an honest padded life", world=PADDED),
    _right("4.138", "an honest life of depth 1", step={"depth": 1}),
    _right("4.139", "an honest life of depth 32", world={"depth": 32, "slots": 2}),
    _right("4.140", "an honest sparse life of k = 1", step={**SPARSE, "support": 1}),
    _right("4.141", "an honest life without the draw proof", world={"draw_proof": False}),
    _right("4.142", "an honest life of a dense-only session", world={"sparse": False}),
    _right("4.143", "an honest life of a sparse-only session", world={"dense": False}, step=SPARSE),
    _right("4.144", "an honest life at temperature 0", step={"temperature": 0.0}),
    _right("4.145", "an honest life in a vocabulary of 1000", world={"vocab": 1000}),
    _right("4.147", "an honest life of depth 31", world={"depth": 31, "slots": 2}),
    _right("4.146", "an honest life in a vocabulary of eight tokens", world={"vocab": 8, "support": 1}, step=SPARSE),
)

CASES: Final[tuple[Case, ...]] = (*CLAIMS, *PLACES, *DENSE_VALUES, *SPARSE_VALUES, *COMPLETIONS, *RIGHT)
