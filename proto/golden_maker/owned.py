"""The frames of a group link whose votes and decisions carry a payload: mode "request-owner", two ranks.

Between `story` (whose digests it takes) and `make_golden`. Rank 0 is the coordinator, rank 1 the member. A request of rank 1's
shows what its vote claims of the rows; one of rank 0's shows the tokens that a decision tells the rank without rows.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from . import encoder as enc
from .encoder import Frame
from .faults import Faults
from .group import ASKING, OPEN, PLACE, STATE
from .story import SPARSE, Session, Story, Vector

O64 = Session(
    "o64", 64, 3, 8, 4, 64, 0x5E5510D0_07000064, 0x4ECE1BE4_0B007002, 0x4E3BE400_0B007051, 0x0102030405060708,
    0xC0FFEE00_D15EA5E5, (5, 17, 63, 0, 42), group_mode="request-owner",
)  # fmt: skip
TOKENS = (19, 63)


def claim_payload(first_id: int, end_id: int, rows: Sequence[tuple[int, int, int]]) -> bytes:
    """What a ready VOTE says of its rows: the range, then (token, shard_mass, mass_before) of each."""
    return struct.pack("<II", first_id, end_id) + b"".join(struct.pack("<iII", *row) for row in rows)


def valid() -> list[Vector]:
    """Every valid vector of this group link."""
    tale = Story(O64, 3)
    out: list[Vector] = []

    def tell(name: str, frame: Frame, effect: str, summary: str, before: tuple[str, ...], **detail: Any) -> Frame:
        to = "member" if frame.fields["boot_nonce"] == O64.leader_nonce else "coordinator"
        out.append(Vector(name, summary, O64, to, frame, before, effect, detail))
        return frame

    tell("epoch_asking_owned", tale.blank("EPOCH", "leader", epoch=1, phase=ASKING), "epoch_asked", "As epoch_asking.", ())
    tell("agree_owned", tale.blank("AGREE", "receiver", epoch=1, **STATE, floor=6), "agreed", "As agree.",
         ("epoch_asking_owned",))  # fmt: skip
    asked = ("epoch_asking_owned", "agree_owned")
    tell("epoch_open_owned", tale.blank("EPOCH", "leader", epoch=1, phase=OPEN), "epoch_open", "As epoch_open.", asked)
    opened = (*asked, "epoch_open_owned")
    step = tale.step(round=9, **PLACE, depth=2, representation=SPARSE, support_policy=8, temperature=0.75,
                     target_context=0xA1A2A3A4A5A6A7A8, trace_id=0xB1B2B3B4B5B6B7B8, budget_us=250_000)  # fmt: skip
    same = ("position", "depth", "representation", "support_policy", "target_context", "trace_id", "budget_us")
    for owner in (0, 1):
        grant = tale.about("GRANT", "leader", step, epoch=1, owner=owner, seed=O64.request_seed,
                           context=enc.context_digest(step.fields), **{name: step.fields[name] for name in same})  # fmt: skip
        tell(f"grant_owner_{owner}", grant, ("voted", "granted")[owner], f"Rank {owner} asks for the rows.", opened)

    rows = [(token, enc.MASS, 0) for token in TOKENS]
    ballot = {"epoch": 1, **PLACE}
    vote = tale.blank("VOTE", "receiver", **ballot)
    tell("vote_claim", replace(vote, payload=claim_payload(0, 64, rows)), "decided:ready",
         "Rank 1 judged its rows and claims them; rank 0 has none, and nothing against it.", (*opened, "grant_owner_1"),
         first_id=0, end_id=64, rows=[list(row) for row in rows])  # fmt: skip
    tell("vote_rowless", vote, "voted", "Rank 1 has no rows of this request: ready from the GRANT on, and claims nothing.",
         (*opened, "grant_owner_0"))  # fmt: skip
    decide = replace(tale.blank("DECIDE", "leader", **ballot), payload=enc.tokens_payload(TOKENS))
    tell("decide_tokens", decide, "ready", "Every rank voted ready; rank 1, which has no rows, learns the tokens.",
         (*opened, "grant_owner_0", "vote_rowless"), tokens=list(TOKENS))  # fmt: skip
    return out


def faults(of: Faults) -> None:
    """What either end refuses of such a payload; all of it costs the link, but claims that do not go together."""
    link = "link"

    def claims(name: str, reason: str, cost: str, summary: str, payload: bytes, base: str = "vote_claim") -> None:
        of.add(name, reason, cost, summary, base, replace(of.frame(base), payload=payload))

    rows = [(token, enc.MASS, 0) for token in TOKENS]
    whole = claim_payload(0, 64, rows)
    claims("claim_missing", "length_bounds", link, "A ready vote of the rank with the rows, without a claim.", b"")
    claims("claim_of_others", "length_bounds", link, "A claim by a rank that has no rows.", whole, "vote_rowless")
    claims("claim_ragged", "length_bounds", link, "Four bytes too many.", whole + bytes(4))
    claims("claim_short", "length_bounds", link, "Not even a range.", whole[:4])
    of.add("claim_digest", "payload_digest", link, "Its digest is off by one bit.", "vote_claim",
           replace(of.frame("vote_claim"), payload_digest=of.frame("vote_claim").digest_of_payload() ^ 1))  # fmt: skip
    proposal = "proposal"
    claims("claim_half", "id_range", proposal, "Half of the vocabulary.", claim_payload(0, 32, rows))
    claims("claim_few", "rank_disagree", proposal, "One row of two.", claim_payload(0, 64, rows[:1]))
    claims("claim_light", "mass", proposal, "A row that lacks one ticket.",
           claim_payload(0, 64, [rows[0], (63, enc.MASS - 1, 0)]))  # fmt: skip
    claims("claim_token", "id_range", proposal, "A token beyond the vocabulary.",
           claim_payload(0, 64, [rows[0], (64, enc.MASS, 0)]))  # fmt: skip

    def decides(name: str, reason: str, summary: str, payload: bytes) -> None:
        of.add(name, reason, link, summary, "decide_tokens", replace(of.frame("decide_tokens"), payload=payload))

    decides("decide_no_tokens", "length_bounds", "Ready, and no tokens for the rank that has none.", b"")
    decides("decide_one_token", "length_bounds", "One token of two.", enc.tokens_payload(TOKENS[:1]))
    decides("decide_token", "id_range", "A token beyond the vocabulary.", enc.tokens_payload((19, 64)))
    of.add("decide_digest", "payload_digest", link, "Its digest is off by one bit.", "decide_tokens",
           replace(of.frame("decide_tokens"), payload_digest=of.frame("decide_tokens").digest_of_payload() ^ 1))  # fmt: skip
    of.add("owner_beyond", "semantic_mismatch", link, "Rows for rank 2 of two.", "grant_owner_1", owner=2)
    of.add("owner_everyone", "semantic_mismatch", link, "Rows for every rank; each request has one owner.", "grant_owner_1",
           owner=0xFFFFFFFF)  # fmt: skip
