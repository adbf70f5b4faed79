"""The frames of a group link: one epoch of two ranks, told from rank 0's question to the end, and what either end refuses.

Between `story` (whose rows and digests it takes) and `make_golden`. Its session's leader is the coordinator, rank 0; its receiver
the member, rank 1.
"""

from __future__ import annotations

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
    return out


def faults(of: Faults) -> None:
    """What either end of a group link refuses; all of it costs the link, but a frame of an epoch that is over."""
    add, link = of.add, "link"
    unused = {"vote_ready": 64, "decide_ready": 84, "released": 88, "epoch_open": 84, "agree": 90, "leave": 72}
    for base, offset in unused.items():
        patched = replace(of.frame(base), patch={offset: b"\x01"})
        add(f"reserved_in_{base}", "reserved_bits", link, f"Byte {offset} of the argument area is not zero.", base, patched)
    stray = {"vote_ready": "request", "agree": "slot", "grant": "shard", "epoch_open": "slot", "leave": "round"}
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
