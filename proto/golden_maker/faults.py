"""The invalid frames: each valid frame of `story` with one thing wrong, and the one reason it must meet.

Between `story` and `make_golden`. Digests are right unless they are the fault, so that the named check, and no earlier
one, is what refuses the frame.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from . import encoder as enc
from .encoder import Frame
from .story import DENSE, SPARSE, V64, Vector

OVERLOAD = 45
NO_SUCH_REASON = 999
NAN = 0x7FC00000
NEGATIVE_ZERO = 0x80000000


class Faults:
    """Collects invalid vectors over the valid ones, by name."""

    def __init__(self, valid: list[Vector]) -> None:
        self.valid = {vector.name: vector for vector in valid}
        self.out: list[Vector] = []

    def frame(self, base: str) -> Frame:
        """The valid frame of that name."""
        return self.valid[base].frame

    def add(
        self, name: str, reason: str, cost: str, summary: str, base: str, frame: Frame | None = None,
        before: tuple[str, ...] | None = None, to: str | None = None, now_us: int = 0, **fields: Any,
    ) -> None:  # fmt: skip
        """One vector: `base` with `fields` changed, or `frame`, sent to the same end after the same frames."""
        origin = self.valid[base]
        sent = (frame or origin.frame).but(**fields)
        self.out.append(
            Vector(
                name, summary, origin.session, to or origin.to, sent, origin.before if before is None else before,
                reason=reason, cost=cost, now_us=now_us,
            )
        )  # fmt: skip

    def flipped(self, base: str, **bits: int) -> dict[str, Any]:
        """Fields of `base` with those bits toggled."""
        return {name: self.frame(base).fields.get(name, 0) ^ bit for name, bit in bits.items()}

    # -- the header ----------------------------------------------------------------------------------------------------

    def header(self) -> None:
        """What `Header.decode` refuses, whoever receives it."""
        base = "reply_dense_0"
        frame = self.frame(base)
        link = "link"
        self.add("bad_magic", "bad_magic", link, "The magic is PP1R.", base, magic=b"PP1R")
        self.add("bad_version_1", "bad_version", link, "A frame of wire version 1.", base, version=1)
        self.add("bad_version_3", "bad_version", link, "A frame of a later wire version.", base, version=3)
        self.add("unknown_kind_0", "unknown_kind", link, "Kind 0.", base, replace(frame, kind_byte=0))
        self.add("unknown_kind_20", "unknown_kind", link, "Kind 20.", base, replace(frame, kind_byte=20))
        self.add("unknown_flag", "unknown_flag", link, "A flag bit; version 2 has none.", base, flags=1)
        wrong = replace(frame, header_digest=enc.xxh3(frame.header()[:120]) ^ 1)
        self.add("header_digest", "header_digest", link, "The header's digest is off by one bit.", base, wrong)
        self.add("reserved_common", "reserved_bits", link, "Byte 55 is not zero.", base, reserved=0x0100)
        unused = {"reply_dense_0": 96, "completion_dense": 94, "step_dense": 108, "commit_verified": 92, "open": 96,
                  "reset_to_leader": 64, "token": 80}  # fmt: skip
        for kind, offset in unused.items():
            patched = replace(self.frame(kind), patch={offset: b"\x01"})
            self.add(f"reserved_in_{kind}", "reserved_bits", link, f"Byte {offset} of the argument area is not zero.",
                     kind, patched)  # fmt: skip
        stray = (("completion_dense", "entry_count"), ("completion_dense", "representation"), ("step_dense", "shard"),
                 ("step_dense", "payload_length"), ("reset_to_leader", "position"), ("close", "round"),
                 ("open", "depth"), ("commit_verified", "slot"), ("token", "depth"))  # fmt: skip
        for kind, field in stray:
            changed = self.frame(kind).but(**{field: 1})
            self.add(f"stray_{field}_in_{kind}", "reserved_bits", link,
                     f"A field that this kind does not carry: {field}.", kind, changed)  # fmt: skip
        self.add("link_length", "length_bounds", link, "A payload beyond every negotiated bound; none of it follows.",
                 base, replace(frame, payload=b"", payload_digest=1), payload_length=V64.max_payload + 1)  # fmt: skip

    # -- rows ----------------------------------------------------------------------------------------------------------

    def identity(self) -> None:
        """A row that is right, for something else."""
        base, proposal = "reply_dense_0", "proposal"
        add, flipped = self.add, self.flipped
        add(
            "row_boot_nonce",
            "boot_nonce",
            "link",
            "An earlier life of the leader.",
            base,
            **flipped(base, boot_nonce=1),
        )
        add("row_session", "session_mismatch", "link", "Another session.", base, **flipped(base, session=1))
        add("row_slot_bounds", "slot_bounds", "link", "Slot 4 of 4.", base, slot=4)
        add("row_future", "slot_state", "link", "A generation that was never granted.", base, slot_generation=8)
        add("row_past", "generation_stale", "frame", "An earlier generation of the slot: drained.", base,
            slot_generation=6)  # fmt: skip
        late = ("open", "step_dense", "reset_to_leader")
        add("row_after_reset", "generation_stale", "frame", "Arrives after the receiver's RESET: drained.", base,
            before=late)  # fmt: skip
        ready = (*self.valid["completion_dense"].before, "completion_dense")
        add("row_after_ready", "generation_duplicate", "frame", "The proposal is ready already: drained.", base,
            before=ready)  # fmt: skip
        add("row_too_late", "timeout", proposal, "Arrives when the budget is spent.", base, now_us=250_000)
        add("row_request", "request_mismatch", proposal, "Another request.", base, **flipped(base, request=1))
        add("row_request_generation", "generation_stale", proposal, "An earlier generation of the request.", base,
            request_generation=2)  # fmt: skip
        add("row_round", "round_mismatch", proposal, "Another round.", base, round=8)
        add("row_depth", "depth_mismatch", proposal, "Another depth.", base, depth=2)
        add("row_shard", "id_range", proposal, "A vocabulary shard; this session has none.", base, shard=1)
        add("row_context", "context_mismatch", proposal, "Conditioned on something else.", base,
            **flipped(base, context=1))  # fmt: skip
        add("row_at_anchor", "position_bounds", proposal, "The anchor's own position.", base, position=4)
        add("row_beyond_depth", "position_bounds", proposal, "One past the last position.", base, position=8)
        add(
            "row_twice",
            "position_duplicate",
            proposal,
            "The same row again.",
            base,
            before=("open", "step_dense", base),
        )
        second = self.frame("reply_dense_1")
        moved = replace(self.frame(base), payload=second.payload, payload_digest=second.digest_of_payload())
        add("row_misplaced", "payload_digest", proposal, "Position 6's valid row under position 5's header.", base,
            moved)  # fmt: skip

    def claims(self) -> None:
        """What a row's header says of the row."""
        base, proposal = "reply_dense_0", "proposal"
        add = self.add
        sparse = self.frame("reply_sparse_0")
        add("row_representation", "representation", proposal, "Says sparse where dense was granted.", base,
            representation=SPARSE)  # fmt: skip
        add("row_no_representation", "representation", proposal, "No representation.", base, representation=0)
        add("dense_entries", "support_bounds", proposal, "63 entries in a dense row.", base, entry_count=63)
        short = replace(self.frame(base), payload=self.frame(base).payload[:192])
        add("dense_short", "length_bounds", proposal, "A dense row of 192 bytes.", base, short)
        add("row_first_id", "id_range", proposal, "Starts at ID 1.", base, first_id=1)
        add("row_end_id", "id_range", proposal, "Ends at ID 63.", base, end_id=63)
        add("row_shard_mass", "mass", proposal, "Claims half the mass.", base, shard_mass=enc.MASS // 2)
        add("row_mass_before", "mass", proposal, "Claims mass before it.", base, mass_before=1)
        add("row_draw_counter", "draw_mismatch", proposal, "A draw counter other than 0.", base, draw_counter=1)
        add("token_beyond", "id_range", proposal, "Token 64 of a vocabulary of 64.", base, token=64)
        add("token_negative", "id_range", proposal, "Token -1.", base, token=-1)
        add("sparse_none", "support_bounds", proposal, "No entry.", "reply_sparse_0",
            replace(sparse, payload=b""), entry_count=0)  # fmt: skip
        nine = enc.sparse_payload(list(range(9)), enc.counts_to_mass([1] * 9))
        add("sparse_nine", "support_bounds", proposal, "Nine entries where eight were granted.", "reply_sparse_0",
            replace(sparse, payload=nine), entry_count=9)  # fmt: skip
        add("sparse_length", "length_bounds", proposal, "Four bytes too many.", "reply_sparse_0",
            replace(sparse, payload=sparse.payload + bytes(4)))  # fmt: skip

    def values(self) -> None:
        """Rows that arrive whole and are no categorical q, or not the one the token was drawn from."""
        self._dense_values()
        self._sparse_values()

    def _dense_values(self) -> None:
        base, proposal = "reply_dense_0", "proposal"
        frame = self.frame(base)
        meaning = self.valid[base].detail

        def row(name: str, reason: str, summary: str, index: int, bits: int) -> None:
            payload = bytearray(frame.payload)
            struct.pack_into("<I", payload, 4 * index, bits)
            self.add(name, reason, proposal, summary, base, replace(frame, payload=bytes(payload)))

        row("dense_nan", "nonfinite", "One value is NaN.", 5, NAN)
        row("dense_infinity", "nonfinite", "One value is infinite.", 63, 0x7F800000)
        row("dense_negative_zero", "negative", "One zero is -0.0.", 0, NEGATIVE_ZERO)
        row("dense_negative", "negative", "One value is negative.", 1, _bits(-1 / enc.MASS))
        row("dense_half_count", "nondyadic", "One value is 2^-25.", 0, _bits(0.5 / enc.MASS))
        row("dense_above_one", "nondyadic", "One value is 2.", 2, _bits(2.0))
        row("dense_subnormal", "nondyadic", "One value is the smallest subnormal.", 0, 1)
        row("dense_mass", "mass", "One count too many.", 0, _bits(1 / enc.MASS))
        wrong = replace(frame, payload_digest=frame.digest_of_payload() ^ 1 << 63)
        self.add("dense_digest", "payload_digest", proposal, "The payload's digest is off by one bit.", base, wrong)
        zero = meaning["counts"].index(0)
        self.add("dense_zero_token", "zero_q_token", proposal, "The token has no mass.", base, token=zero)
        other = next(v for v, count in enumerate(meaning["counts"]) if count and v != frame.fields["token"])
        self.add(
            "dense_draw", "draw_mismatch", proposal, "A token with mass, but not the one drawn.", base, token=other
        )
        padded = self.frame("reply_v100")
        payload = padded.payload[:400] + bytes(47) + b"\x01"
        self.add("dense_padding", "padding_nonzero", proposal, "The last padding byte is 1.", "reply_v100",
                 replace(padded, payload=payload))  # fmt: skip

    def _sparse_values(self) -> None:
        base, proposal = "reply_sparse_0", "proposal"
        frame = self.frame(base)
        meaning = self.valid[base].detail
        ids, counts = meaning["ids"], meaning["counts"]

        def row(name: str, reason: str, summary: str, ids: list[int], counts: list[int], **fields: Any) -> None:
            changed = replace(frame, payload=enc.sparse_payload(ids, counts))
            self.add(name, reason, proposal, summary, base, changed, **fields)

        row("sparse_id_beyond", "id_range", "The last ID is 64.", [*ids[:-1], 64], counts)
        row("sparse_id_negative", "id_range", "The first ID is -1.", [-1, *ids[1:]], counts)
        row("sparse_order", "id_order", "Two IDs descend.", [ids[0], ids[2], ids[1], *ids[3:]], counts)
        row("sparse_duplicate", "id_duplicate", "An ID twice.", [ids[0], ids[0], *ids[2:]], counts)
        row("sparse_zero", "zero_entry", "An entry without mass.", ids, [0, counts[0] + counts[1], *counts[2:]])
        row("sparse_mass", "mass", "One count too few.", ids, [counts[0] - 1, *counts[1:]])
        row("sparse_zero_token", "zero_q_token", "The token is no entry.", ids, counts, token=1)
        other = next(v for v in ids if v != frame.fields["token"])
        row("sparse_draw", "draw_mismatch", "A token of the support, but not the one drawn.", ids, counts, token=other)
        nan = struct.pack("<I", NAN) + frame.payload[4:]
        self.add("sparse_nan", "nonfinite", proposal, "One value is NaN.", base, replace(frame, payload=nan))
        negative = struct.pack("<f", -counts[0] / enc.MASS) + frame.payload[4:]
        self.add(
            "sparse_negative", "negative", proposal, "One value is negative.", base, replace(frame, payload=negative)
        )
        self.add("sparse_digest", "payload_digest", proposal, "The payload's digest is off by one bit.", base,
                 replace(frame, payload_digest=frame.digest_of_payload() ^ 1))  # fmt: skip

    # -- completions and notices ---------------------------------------------------------------------------------------

    def completions(self) -> None:
        """COMPLETIONs that do not close what was granted, and notices that name nothing."""
        base, proposal = "completion_dense", "proposal"
        add, flipped = self.add, self.flipped
        rows = self.valid[base].before
        add("done_early", "incomplete", proposal, "A row is missing.", base, before=rows[:-1])
        add("done_positions", "incomplete", proposal, "Says two rows.", base, positions=2)
        add("done_size", "reply_size", proposal, "One byte more than arrived.", base, **flipped(base, reply_size=1))
        add("done_digest", "payload_digest", proposal, "The digest over the rows is off by one bit.", base,
            **flipped(base, reply_digest=1))  # fmt: skip
        add("done_position", "position_bounds", proposal, "Not the anchor's position.", base, position=5)
        add("done_context", "context_mismatch", proposal, "Another context.", base, **flipped(base, context=1))
        add("done_round", "round_mismatch", proposal, "Another round.", base, round=10)
        add("done_failed", "overload", proposal, "The draft gave up, and says why.", base, status=OVERLOAD)
        add("done_unknown", "incomplete", proposal, "A status this version has no reason for.", base,
            status=NO_SUCH_REASON)  # fmt: skip
        add("done_twice", "generation_duplicate", "frame", "The proposal is ready already.", base, before=(*rows, base))
        add("done_future", "slot_state", "link", "A generation that was never granted.", base, slot_generation=8)
        add("notice_without_reason", "reserved_bits", "link", "A RESET with status 0.", "reset_to_receiver", status=0)
        add("notice_unknown_reason", "reserved_bits", "link", "A status beyond the list.", "status_step",
            status=NO_SUCH_REASON)  # fmt: skip
        add("notice_slot_bounds", "slot_bounds", "link", "A RESET of slot 4 of 4.", "reset_to_receiver", slot=4)
        add("leader_notice_without_reason", "reserved_bits", "link", "A CANCEL with status 0.", "cancel_to_leader",
            status=0)  # fmt: skip
        add("leader_notice_slot_bounds", "slot_bounds", "link", "A RESET of slot 4 of 4.", "reset_to_leader", slot=4)
        nonce = V64.leader_nonce
        granted = ("open", "step_dense")
        for kind, base_name in (("step", "step_dense"), ("open", "open"), ("token", "token")):
            wrong = self.frame(base_name).but(boot_nonce=nonce)
            add(f"receiver_gets_{kind}", "unexpected_kind", "link", f"A receiver never gets a {kind.upper()}.",
                base_name, wrong, to="receiver", before=granted)  # fmt: skip
        reply = self.frame("reply_dense_0").but(boot_nonce=V64.receiver_nonce)
        add("leader_gets_reply", "unexpected_kind", "link", "A leader never gets a REPLY.", "reply_dense_0", reply,
            to="leader")  # fmt: skip

    # -- what a leader refuses -----------------------------------------------------------------------------------------

    def steps(self) -> None:
        """STEPs that are answered with a STATUS, and frames that cost the leader's link."""
        base, step = "step_dense", "step"
        add, flipped = self.add, self.flipped
        granted = ("open", base)
        add(
            "step_boot_nonce",
            "boot_nonce",
            "link",
            "An earlier life of the receiver.",
            base,
            **flipped(base, boot_nonce=1),
        )
        add("step_session", "session_mismatch", "link", "Another session.", base, **flipped(base, session=1))
        add("step_slot_bounds", "slot_bounds", "link", "Slot 4 of 4.", base, slot=4)
        add("step_twice", "generation_duplicate", step, "The same STEP again.", base, before=granted)
        add("step_older", "generation_stale", step, "An earlier generation of the slot.", base, before=granted,
            slot_generation=6, round=10)  # fmt: skip
        add(
            "step_request_unknown",
            "request_unknown",
            step,
            "A request that is not open.",
            base,
            **flipped(base, request=1),
        )
        add("step_key_reuse", "key_reuse", step, "The same generation and round in another slot.", base, before=granted,
            slot=1, slot_generation=1)  # fmt: skip
        add("step_request_generation", "generation_stale", step, "An earlier generation of the request.", base,
            request_generation=2)  # fmt: skip
        add("step_after_reset", "generation_stale", step, "The generation that a RESET ended, in a later round.", base,
            before=(*granted, "reset_to_leader"), slot_generation=8, round=10)  # fmt: skip
        add("step_depth_0", "depth_mismatch", step, "Depth 0.", base, depth=0)
        add("step_depth_4", "depth_mismatch", step, "Depth 4 of 3.", base, depth=4)
        add("step_position", "position_bounds", step, "Not the committed position.", base, position=5)
        add("step_prefix", "context_mismatch", step, "Another committed prefix.", base, **flipped(base, prefix_high=1))
        add("step_representation", "representation", step, "Representation 3.", base, representation=3)
        add("step_support", "support_bounds", step, "More than the vocabulary.", base, support_policy=65)
        add("step_dense_unwanted", "representation", step, "Dense rows in a session without them.", "step_thin",
            representation=DENSE, support_policy=0)  # fmt: skip
        add("step_sparse_unwanted", "representation", step, "Sparse rows in a session without them.", "step_v100",
            representation=SPARSE, support_policy=8)  # fmt: skip
        sparse = "step_sparse"
        add("step_sparse_support", "support_bounds", step, "Nine entries where eight are negotiated.", sparse,
            support_policy=9)  # fmt: skip
        add("step_sparse_none", "support_bounds", step, "A sparse row of no entries.", sparse, support_policy=0)
        for name, value in (("nan", float("nan")), ("infinite", float("inf")), ("negative", -1.0), ("vast", 2e6)):
            add(f"step_temperature_{name}", "limits_mismatch", step, f"A temperature that is {name}.", base,
                temperature=value)  # fmt: skip
        add("step_no_budget", "limits_mismatch", step, "A budget of 0.", base, budget_us=0)

    def draft_tokens(self) -> None:
        """TOKENs that a draft peer refuses; all but a late one cost the link."""
        base, link, position = "token", "link", self.frame("token").fields["position"]
        add, flipped = self.add, self.flipped
        granted = self.valid[base].before
        add("token_boot_nonce", "boot_nonce", link, "An earlier life of the draft's leader.", base, **flipped(base, boot_nonce=1))
        add("token_slot_bounds", "slot_bounds", link, "Slot 4 of 4.", base, slot=4)
        add("token_future", "slot_state", link, "A generation that was never granted.", base, slot_generation=8)
        add("token_stale", "generation_stale", "frame", "A generation that is over: dropped.", base, slot_generation=6)
        add("token_dead", "generation_stale", "frame", "A generation that was reset: dropped.", base,
            before=(*granted, "reset_to_leader"))  # fmt: skip
        add("token_request", "request_mismatch", link, "Another request.", base, **flipped(base, request=1))
        add("token_generation", "generation_stale", link, "Another generation of the request.", base, request_generation=2)
        add("token_round", "round_mismatch", link, "Another round.", base, round=10)
        add("token_context", "context_mismatch", link, "Another context.", base, **flipped(base, context=1))
        add("token_early", "position_bounds", link, "The second position's before the first.", base, position=position + 1)
        add("token_again", "position_bounds", link, "The first position's again.", base, before=(*granted, base))
        add("token_draw_counter", "draw_mismatch", link, "A draw counter; this RNG ABI has none.", base, draw_counter=1)
        add("drawn_beyond", "id_range", link, "Token 64 of a vocabulary of 64.", base, token=64)
        add("drawn_negative", "id_range", link, "Token -1.", base, token=-1)

    def prefixes(self) -> None:
        """OPEN, COMMIT and CLOSE whose prefix does not hold together. The link goes: both sides disagree on it."""
        add, flipped, link = self.add, self.flipped, "link"
        opened = self.frame("open")
        add("open_twice", "request_duplicate", link, "The request is open already.", "open", before=("open",))
        add("open_length", "length_bounds", link, "Says four tokens and carries five.", "open", token_count=4)
        empty = replace(opened, payload=b"")
        add("open_empty", "length_bounds", link, "No token.", "open", empty, token_count=0)
        vast = replace(opened, payload=b"", payload_digest=1)
        add("open_vast", "length_bounds", link, "65 tokens where 64 are negotiated; none of them follows.", "open",
            vast, token_count=65, payload_length=260)  # fmt: skip
        add("open_digest", "payload_digest", link, "The payload's digest is off by one bit.", "open",
            replace(opened, payload_digest=opened.digest_of_payload() ^ 1))  # fmt: skip
        add(
            "open_token",
            "id_range",
            link,
            "Token 64 of a vocabulary of 64.",
            "open",
            *_tokens(opened, [5, 64, 63, 0, 42]),
        )
        add("open_token_negative", "id_range", link, "Token -1.", "open", *_tokens(opened, [5, -1, 63, 0, 42]))
        add(
            "open_prefix",
            "context_mismatch",
            link,
            "Not the digest of its tokens.",
            "open",
            **flipped("open", prefix_low=1),
        )
        add("open_position", "position_bounds", link, "Not the last token's position.", "open", position=5)
        base = "commit_verified"
        frame = self.frame(base)
        add("commit_unknown", "request_unknown", link, "A request that is not open.", base, before=())
        add("commit_source", "reserved_bits", link, "Source 3.", base, source=3)
        add("commit_position", "position_bounds", link, "Not the new last position.", base, position=8)
        add("commit_prefix", "context_mismatch", link, "Not the digest of the new prefix.", base,
            **flipped(base, prefix_low=1))  # fmt: skip
        add("commit_digest", "payload_digest", link, "The payload's digest is off by one bit.", base,
            replace(frame, payload_digest=frame.digest_of_payload() ^ 1))  # fmt: skip
        add("commit_length", "length_bounds", link, "Says two tokens and carries three.", base, token_count=2)
        add("close_unknown", "request_unknown", link, "A request that is not open.", "close", before=())


def _bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def _tokens(opened: Frame, tokens: list[int]) -> tuple[Frame]:
    """OPEN with other tokens and the prefix digest that follows from them."""
    low, high = enc.prefix_digest(tokens)
    changed: Mapping[str, int] = {"prefix_low": low, "prefix_high": high}
    return (replace(opened, payload=enc.tokens_payload(tokens)).but(**changed),)


def invalid(valid: list[Vector], *more: Callable[[Faults], None]) -> list[Vector]:
    """Every invalid data-plane vector but the proofs; `more` adds those of other modules."""
    faults = Faults(valid)
    for part in (faults.header, faults.identity, faults.claims, faults.values, faults.completions, faults.steps,
                 faults.draft_tokens, faults.prefixes):  # fmt: skip
        part()
    for other in more:
        other(faults)
    return faults.out
