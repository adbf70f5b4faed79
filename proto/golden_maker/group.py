"""The frames of a group link: one epoch of two ranks, told from rank 0's question to the end, and what either end refuses.

Between `story` (whose rows and digests it takes) and `make_golden`. Its session's leader is the coordinator, rank 0; its receiver
the member, rank 1.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from . import encoder as enc
from .encoder import Frame
from .faults import Faults
from .story import SPARSE, SPARSE_ROWS, TIMEOUT, Session, Story, Vector

PAYLOAD_DIGEST = 22
PEER_LOST = 41
NO_SUCH_REASON = 999
GATHERING, ASKING, OPEN = 1, 2, 3
EVERY_RANK = 0xFFFFFFFF

G64 = Session(
    "g64", 64, 3, 8, 4, 64, 0x5E5510D0_06000064, 0x4ECE1BE4_0B007002, 0x4E3BE400_0B007041, 0x0102030405060708,
    0xC0FFEE00_D15EA5E5, (5, 17, 63, 0, 42),
)  # fmt: skip
STATE = {"state_low": 0xD1D2D3D4D5D6D7D8, "state_high": 0xE1E2E3E4E5E6E7E8}
PLACE = {"slot": 0, "slot_generation": 7}
WINNERS, SCORE, ACCEPT = 1, 2, 18
MINUS_INF = float("-inf")


def winners(rows: Sequence[tuple[float, int]]) -> bytes:
    """Winners or candidates: (value, global ID), 12 bytes each."""
    return b"".join(struct.pack("<di", *row) for row in rows)


def valid() -> list[Vector]:
    """Every valid vector of the group link."""
    tale = Story(G64, 3)
    out: list[Vector] = []

    def tell(name: str, frame: Frame, effect: str, summary: str, before: tuple[str, ...], **detail: Any) -> Frame:
        to = "member" if frame.fields["boot_nonce"] == G64.leader_nonce else "coordinator"
        out.append(Vector(name, summary, G64, to, frame, before, effect, detail))
        return frame

    def by_0(kind: str, **fields: Any) -> Frame:
        return tale.blank(kind, "leader", epoch=1, **fields)

    def by_1(kind: str, **fields: Any) -> Frame:
        return tale.blank(kind, "receiver", epoch=1, **fields)

    tell("epoch_gathering", by_0("EPOCH", phase=GATHERING), "epoch_out", "Not every rank is up.", ())
    tell("epoch_asking", by_0("EPOCH", phase=ASKING), "epoch_asked", "Every rank is up and is asked for its state.", ())
    tell("agree", by_1("AGREE", **STATE, floor=6), "agreed", "Rank 1's committed state; it has seen generations up to 6.",
         ("epoch_asking",))  # fmt: skip
    asked = ("epoch_asking", "agree")
    tell("epoch_open", by_0("EPOCH", phase=OPEN), "epoch_open", "All ranks agree: slots may be granted.", asked)
    opened = (*asked, "epoch_open")
    step = tale.step(round=9, **PLACE, depth=1, representation=SPARSE, support_policy=8, temperature=0.75,
                     target_context=0xA1A2A3A4A5A6A7A8, trace_id=0xB1B2B3B4B5B6B7B8, budget_us=250_000)  # fmt: skip
    same = ("position", "depth", "representation", "support_policy", "target_context", "trace_id", "budget_us")
    grant = tale.about("GRANT", "leader", step, epoch=1, owner=EVERY_RANK, seed=G64.request_seed,
                       context=enc.context_digest(step.fields), **{name: step.fields[name] for name in same})  # fmt: skip
    tell("grant", grant, "granted", "Grants rank 1 the slot that rank 0 was granted.", opened)
    seen = (*opened, "grant")
    counts = enc.counts_to_mass(list(SPARSE_ROWS[0].values()))
    reply, meaning = tale.reply(step, 0, list(SPARSE_ROWS[0]), counts)
    tell("reply_relayed", reply, "row_landed", "The row, digested for the group link.", seen, **meaning)
    done, entries = tale.completion(step, [reply])
    tell("completion_relayed", done, "voted", "Rank 1 has nothing against the proposal.", (*seen, "reply_relayed"), **entries)
    tell("vote_ready", by_1("VOTE", **PLACE), "voted", "Rank 1 votes ready.", seen)
    tell("vote_no", by_1("VOTE", **PLACE, status=PAYLOAD_DIGEST), "decided:payload_digest", "The first failure decides.", seen)
    voted = (*seen, "reply_relayed", "completion_relayed", "vote_ready")
    tell("decide_ready", by_0("DECIDE", **PLACE), "ready", "Every rank voted ready.", voted)
    tell("decide_void", by_0("DECIDE", **PLACE, status=TIMEOUT), "discarded:timeout", "Rank 0's clock ran out.", seen)
    refused = (*seen, "vote_no", "decide_no")
    tell("decide_no", by_0("DECIDE", **PLACE, status=PAYLOAD_DIGEST), "discarded:payload_digest",
         "A rank met a failure.", seen)  # fmt: skip
    tell("released", by_1("RELEASED", **PLACE), "freed", "The slot is free at rank 1.", refused)
    tell("leave", by_1("LEAVE", status=PEER_LOST), "epoch_ended", "Rank 1's target process is gone.", seen)

    def part(rank: int, purpose: int, count: int, payload: bytes, **more: Any) -> Frame:
        place = {"request": step.fields["request"], "request_generation": 3, "round": 9, "position": 4, "shard": rank}
        fields = {**place, "purpose": purpose, "first_id": 32 * rank, "end_id": 32 * rank + 32, "entry_count": count, **more}
        return replace(by_1("EXCHANGE", **fields) if rank else by_0("EXCHANGE", **fields), payload=payload)

    ours, theirs = [(7.5, 33), (MINUS_INF, -1)], [(7.5, 2), (-0.25, 31)]
    tell("exchange_winners", part(1, WINNERS, 2, winners(ours)), "part_heard",
         "Rank 1's winner of each of two rows; of the second it has no logit above -inf.", opened,
         winners=[[str(value), token] for value, token in ours])  # fmt: skip
    tell("exchange_told", part(0, WINNERS, 2, winners(theirs)), "exchanged",
         "Rank 0's, told to rank 1 once all were in: tokens 2 (of equals the lowest) and 31.", (*opened, "exchange_winners"),
         winners=[[str(value), token] for value, token in theirs])  # fmt: skip
    tell("exchange_score", part(1, SCORE, 1, struct.pack("<d", 7.5)), "part_heard", "The largest logit of rank 1's range.",
         opened, values=["7.5"])  # fmt: skip
    accept = (1 << 50, 0, 3 << 40, 11, 0)
    tell("exchange_accept", part(1, ACCEPT, 5, struct.pack("<5Q", *accept)), "part_heard",
         "Rank 1's mass, and of the token, which it holds, integer weight and count; the noise is rank 0's.", opened,
         values=list(accept))  # fmt: skip
    return out


def exchanges(of: Faults) -> None:
    """Parts that no rank may believe."""
    link, base = "link", "exchange_winners"

    def add(name: str, reason: str, summary: str, **fields: Any) -> None:
        of.add(f"exchange_{name}", reason, link, summary, base, **fields)

    def rows(name: str, reason: str, summary: str, found: Sequence[tuple[float, int]]) -> None:
        add(name, reason, summary, frame=replace(of.frame(base).but(entry_count=len(found)), payload=winners(found)))

    add("purpose", "semantic_mismatch", "A purpose that this version does not have.", purpose=22)
    add("count", "length_bounds", "More rows than its bytes.", entry_count=3)
    rows("rows", "length_bounds", "34 rows: depth is 32 at most.", [(1.0, 40)] * 34)
    add("digest", "payload_digest", "Its digest is off by one bit.",
        frame=replace(of.frame(base), payload_digest=of.frame(base).digest_of_payload() ^ 1))  # fmt: skip
    add("rank", "rank_disagree", "Another rank's part.", shard=0)
    add("epoch", "rank_disagree", "An epoch that was not announced.", epoch=2)
    add("closed", "slot_state", "Before the epoch is open.", before=("epoch_asking", "agree"))
    add("ahead", "rank_disagree", "One exchange is left out.", sequence=1)
    add("again", "generation_duplicate", "A second part of the same exchange.", before=(*of.valid[base].before, base))
    add("range", "id_range", "A range beyond the vocabulary.", end_id=65)
    rows("elsewhere", "id_range", "A token of another rank's range.", [(7.5, 31)])
    rows("nobody", "id_range", "No token, and not -inf.", [(7.5, -1)])
    rows("somebody", "id_range", "A token beside -inf.", [(MINUS_INF, 40)])
    score = of.frame("exchange_score")
    of.add("exchange_nan", "nonfinite", link, "NaN has no place in a maximum.", "exchange_score",
           replace(score, payload=struct.pack("<d", float("nan"))))  # fmt: skip
    accept = of.frame("exchange_accept")
    of.add("exchange_noise", "rank_disagree", link, "Noise, which is rank 0's alone.", "exchange_accept",
           replace(accept, payload=struct.pack("<5Q", 1 << 50, 1, 3 << 40, 11, 0)))  # fmt: skip
    of.add("exchange_heavy", "mass", link, "A count beyond 2^24.", "exchange_accept",
           replace(accept, payload=struct.pack("<5Q", 1 << 50, 0, 3 << 40, enc.MASS + 1, 0)))  # fmt: skip
    of.add("exchange_late", "generation_stale", "frame", "An epoch that is over: dropped.", base, epoch=0)
    told = "exchange_told"
    of.add("told_unasked", "rank_disagree", link, "Complete without the member's own part.", told, before=of.valid[base].before)
    of.add("told_round", "round_mismatch", link, "Another round than the member's.", told, round=10)
    of.add("told_range", "id_range", link, "Ranges that leave tokens out.", told, end_id=31)
    of.add("told_few", "length_bounds", link, "Fewer rows than the member's.", told,
           replace(of.frame(told).but(entry_count=1), payload=winners([(7.5, 2)])))  # fmt: skip


def faults(of: Faults) -> None:
    """What either end of a group link refuses; all of it costs the link, but a frame of an epoch that is over."""
    add, link = of.add, "link"
    unused = {"exchange_winners": 84}
    unused |= {"vote_ready": 64, "decide_ready": 84, "released": 88, "epoch_open": 84, "agree": 90, "leave": 72}
    for base, offset in unused.items():
        patched = replace(of.frame(base), patch={offset: b"\x01"})
        add(f"reserved_in_{base}", "reserved_bits", link, f"Byte {offset} of the argument area is not zero.", base, patched)
    exchanges(of)
    stray = {"vote_ready": "request", "agree": "slot", "grant": "shard", "epoch_open": "slot", "leave": "round",
             "exchange_winners": "depth"}
    for base, field in stray.items():
        add(f"stray_{field}_in_{base}", "reserved_bits", link, f"A field that this kind does not carry: {field}.", base,
            of.frame(base).but(**{field: 1}))  # fmt: skip
    granted = (*of.valid["grant"].before, "grant")
    add("grant_epoch", "rank_disagree", link, "An epoch that was not announced.", "grant", epoch=2)
    add("grant_closed", "slot_state", link, "Before the epoch is open.", "grant", before=("epoch_asking", "agree"))
    add("grant_owner", "semantic_mismatch", link, "Rows for one rank; the mode is replicate.", "grant", owner=1)
    add("grant_no_budget", "limits_mismatch", link, "A budget of 0.", "grant", budget_us=0)
    add("grant_depth", "depth_mismatch", link, "Depth 4 of 3.", "grant", depth=4)
    add("grant_representation", "representation", link, "Representation 3.", "grant", representation=3)
    add("grant_support", "support_bounds", link, "Nine entries where eight are negotiated.", "grant", support_policy=9)
    add("grant_position", "position_bounds", link, "At the end of all positions.", "grant", position=0xFFFFFFFF)
    add("grant_in_use", "slot_state", link, "A slot that lands.", "grant", before=granted, slot_generation=8)
    add("decide_unknown", "slot_state", link, "A generation that was not granted.", "decide_void", slot_generation=8)
    add("decide_unvoted", "rank_disagree", link, "Ready without the member's vote.", "decide_ready", before=granted)
    add("decide_other", "rank_disagree", link, "Another decision than before.", "decide_void",
        before=(*of.valid["decide_ready"].before, "decide_ready"))  # fmt: skip
    add("decide_reason", "reserved_bits", link, "A reason that this version does not have.", "decide_void", status=NO_SUCH_REASON)
    add("epoch_phase", "reserved_bits", link, "Phase 4.", "epoch_asking", phase=4)
    add("epoch_back", "generation_stale", link, "An epoch that is over.", "epoch_asking", before=granted, epoch=0)
    add("epoch_unasked", "rank_disagree", link, "Open, and nobody was asked.", "epoch_open", before=())
    add("vote_unknown", "slot_state", link, "A generation that was not granted.", "vote_ready", slot_generation=8)
    add("vote_other", "rank_disagree", link, "Takes the first vote back.", "vote_no", before=(*granted, "vote_ready"))
    add("vote_epoch", "rank_disagree", link, "An epoch that was not announced.", "vote_ready", epoch=2)
    add("vote_late", "generation_stale", "frame", "An epoch that is over: dropped.", "vote_ready", epoch=0)
    add("released_early", "slot_state", link, "Not decided yet.", "released", before=granted)
    add("released_reason", "reserved_bits", link, "With a reason.", "released", status=TIMEOUT)
    add("agree_other", "rank_disagree", link, "Another state than before.", "agree", before=granted, state_high=1)
    add("leave_reason", "reserved_bits", link, "Without a reason.", "leave", status=0)
    step = of.frame("step_dense")
    add("member_gets_step", "unexpected_kind", link, "A member never gets a STEP.", "grant",
        step.but(boot_nonce=G64.leader_nonce, session=G64.session), before=("epoch_asking",))  # fmt: skip
    hub = of.frame("grant").but(boot_nonce=G64.receiver_nonce)
    add("coordinator_gets_grant", "unexpected_kind", link, "A coordinator never gets a GRANT.", "grant", hub,
        before=("epoch_asking",), to="coordinator")  # fmt: skip
