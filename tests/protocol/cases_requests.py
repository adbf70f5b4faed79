"""SPEC 2: OPEN, COMMIT and CLOSE, whose faults cost the link, and STEPs that the leader refuses, at the cost of one proposal."""

from __future__ import annotations

import math
from typing import Final

from pp1q_transport import wire
from pp1q_transport.errors import Reason

from .case import Case, Cost, Life
from .frames import Bend, both, fields, payload_bit, resized, signed_as, tokens, twice

R = Reason
SPARSE: Final = {"representation": wire.SPARSE}


def _link(number: str, title: str, reason: Reason, on: int, bend: Bend, **more: object) -> Life:
    return Life(number=number, spec="2", title=title, reason=reason, on=on, bend=bend, cost=Cost.LINK, **more)  # type: ignore[arg-type]


OPENS: Final = (
    _link("2.101", "OPEN with another prefix digest, low half", R.CONTEXT_MISMATCH, wire.OPEN,
          fields(prefix_low=lambda h: h.prefix_low ^ 1)),
    _link("2.102", "OPEN with another prefix digest, high half", R.CONTEXT_MISMATCH, wire.OPEN,
          fields(prefix_high=lambda h: h.prefix_high ^ (1 << 63))),
    _link("2.103", "OPEN with other tokens than its prefix digest", R.CONTEXT_MISMATCH, wire.OPEN,
          tokens(lambda t: [t[1], t[0], *t[2:]])),
    _link("2.104", "OPEN one position ahead", R.POSITION_BOUNDS, wire.OPEN, fields(position=3)),
    _link("2.105", "OPEN at position 0", R.POSITION_BOUNDS, wire.OPEN, fields(position=0)),
    _link("2.106", "OPEN repeated", R.REQUEST_DUPLICATE, wire.OPEN, twice),
    _link("2.107", "OPEN with a token past the vocabulary", R.ID_RANGE, wire.OPEN, tokens(lambda t: [*t[:-1], 64])),
    _link("2.108", "OPEN with a negative token", R.ID_RANGE, wire.OPEN, tokens(lambda t: [-1, *t[1:]])),
    _link("2.109", "OPEN with a flipped payload bit", R.PAYLOAD_DIGEST, wire.OPEN, payload_bit(0)),
    _link("2.110", "OPEN signed for another request", R.PAYLOAD_DIGEST, wire.OPEN, signed_as(request=9)),
    _link("2.111", "OPEN signed as a COMMIT", R.PAYLOAD_DIGEST, wire.OPEN, signed_as(kind=wire.COMMIT)),
    _link("2.112", "OPEN without tokens", R.LENGTH_BOUNDS, wire.OPEN, tokens(lambda t: [])),
    _link("2.113", "OPEN with fewer tokens than bytes", R.LENGTH_BOUNDS, wire.OPEN, fields(token_count=2)),
    _link("2.114", "OPEN with more tokens than bytes", R.LENGTH_BOUNDS, wire.OPEN, fields(token_count=0x40000003)),
    _link("2.115", "OPEN of a length that is no whole token", R.LENGTH_BOUNDS, wire.OPEN, resized(1)),
)  # fmt: skip

COMMITS: Final = (
    _link("2.116", "COMMIT for a request that was never opened", R.REQUEST_UNKNOWN, wire.COMMIT, fields(request=99)),
    _link("2.117", "COMMIT of source 0", R.RESERVED_BITS, wire.COMMIT, fields(source=0)),
    _link("2.118", "COMMIT of source 3", R.RESERVED_BITS, wire.COMMIT, fields(source=3)),
    _link("2.119", "COMMIT one position ahead", R.POSITION_BOUNDS, wire.COMMIT, fields(position=lambda h: h.position + 1)),
    _link("2.120", "COMMIT one position behind", R.POSITION_BOUNDS, wire.COMMIT, fields(position=lambda h: h.position - 1)),
    _link("2.121", "COMMIT with another prefix digest", R.CONTEXT_MISMATCH, wire.COMMIT, fields(prefix_low=0)),
    _link("2.122", "COMMIT of another token than its prefix digest", R.CONTEXT_MISMATCH, wire.COMMIT, tokens(lambda t: [4])),
    _link("2.123", "COMMIT repeated", R.POSITION_BOUNDS, wire.COMMIT, twice),
    _link("2.124", "COMMIT with a token past the vocabulary", R.ID_RANGE, wire.COMMIT, tokens(lambda t: [64])),
    _link("2.125", "COMMIT with a flipped payload bit", R.PAYLOAD_DIGEST, wire.COMMIT, payload_bit(1)),
    _link("2.126", "COMMIT signed for another round", R.PAYLOAD_DIGEST, wire.COMMIT, signed_as(round=5)),
    _link("2.127", "COMMIT signed for another position", R.PAYLOAD_DIGEST, wire.COMMIT, signed_as(position=9)),
    _link("2.170", "COMMIT of more accepted drafts than tokens", R.LENGTH_BOUNDS, wire.COMMIT, fields(accepted=2, source=1)),
    _link("2.171", "COMMIT of fewer accepted drafts than it can be", R.LENGTH_BOUNDS, wire.COMMIT,
          both(tokens(lambda t: [3, 4, 5]), fields(position=lambda h: h.position + 2))),
    _link("2.172", "COMMIT target-only with accepted drafts", R.LENGTH_BOUNDS, wire.COMMIT, fields(accepted=1, source=2)),
    _link("2.173", "CLOSE with a status", R.RESERVED_BITS, wire.CLOSE, fields(status=1)),
    _link("2.174", "CLOSE with a subject", R.RESERVED_BITS, wire.CLOSE, fields(subject=1)),
    _link("2.175", "OPEN whose prompt goes past its own last position", R.POSITION_BOUNDS, wire.OPEN, fields(max_position=0)),
    Life(number="2.176", spec="2", title="STEP past the request's last position", reason=R.POSITION_BOUNDS, cost=Cost.PROPOSAL,
         on=wire.OPEN, bend=fields(max_position=3)),
    _link("2.128", "COMMIT without tokens", R.LENGTH_BOUNDS, wire.COMMIT, tokens(lambda t: [])),
    _link("2.129", "CLOSE of a request that was never opened", R.REQUEST_UNKNOWN, wire.CLOSE, fields(request=99)),
    _link("2.130", "CLOSE repeated", R.REQUEST_UNKNOWN, wire.CLOSE, twice),
)


def _step(number: str, title: str, reason: Reason, bend: Bend, spec: str = "2", **more: object) -> Life:
    more.setdefault("cost", Cost.PROPOSAL)
    return Life(number=number, spec=spec, title=title, reason=reason, on=wire.STEP, bend=bend, **more)  # type: ignore[arg-type]


STEPS: Final = (
    _step("2.131", "STEP repeated", R.GENERATION_DUPLICATE, twice),
    _step("2.132", "STEP of slot generation 0", R.GENERATION_DUPLICATE, fields(slot_generation=0), outcome=R.TIMEOUT,
          counts=(0, 1)),
    _step("2.133", "STEP for a request that was never opened", R.REQUEST_UNKNOWN, fields(request=99),
          outcome=R.REQUEST_MISMATCH, counts=(0, 1)),
    _step("2.134", "STEP of depth 0", R.DEPTH_MISMATCH, fields(depth=0)),
    _step("2.135", "STEP deeper than negotiated", R.DEPTH_MISMATCH, fields(depth=4)),
    _step("2.136", "STEP of depth 255", R.DEPTH_MISMATCH, fields(depth=255)),
    _step("2.137", "STEP one position ahead", R.POSITION_BOUNDS, fields(position=3)),
    _step("2.138", "STEP one position behind", R.POSITION_BOUNDS, fields(position=1)),
    _step("2.139", "STEP at the last position there is", R.POSITION_BOUNDS, fields(position=0xFFFFFFFF)),
    _step("2.140", "STEP from another prefix, low half", R.CONTEXT_MISMATCH, fields(prefix_low=lambda h: h.prefix_low ^ 2)),
    _step("2.141", "STEP from another prefix, high half", R.CONTEXT_MISMATCH, fields(prefix_high=0)),
    _step("2.142", "STEP at temperature NaN", R.LIMITS_MISMATCH, fields(temperature=math.nan)),
    _step("2.143", "STEP at temperature +inf", R.LIMITS_MISMATCH, fields(temperature=math.inf)),
    _step("2.144", "STEP at temperature -inf", R.LIMITS_MISMATCH, fields(temperature=-math.inf)),
    _step("2.145", "STEP at temperature -1", R.LIMITS_MISMATCH, fields(temperature=-1.0)),
    _step("2.146", "STEP above temperature 10^6", R.LIMITS_MISMATCH, fields(temperature=1.5e6)),
    _step("2.147", "STEP of budget 0", R.LIMITS_MISMATCH, fields(budget_us=0)),
    _step("2.148", "STEP of representation 0", R.REPRESENTATION, fields(representation=0)),
    _step("2.149", "STEP of representation 3", R.REPRESENTATION, fields(representation=3)),
    _step("2.150", "sparse STEP in a dense-only session", R.REPRESENTATION,
          fields(representation=wire.SPARSE, support_policy=2), world={"sparse": False}),
    _step("2.151", "dense STEP in a sparse-only session", R.REPRESENTATION,
          fields(representation=wire.DENSE, support_policy=0), world={"dense": False}, step=SPARSE),
    _step("2.152", "sparse STEP of k = 0", R.SUPPORT_BOUNDS, fields(support_policy=0), step=SPARSE),
    _step("2.153", "sparse STEP of k above the negotiated support", R.SUPPORT_BOUNDS, fields(support_policy=9), step=SPARSE),
    _step("2.154", "dense STEP of a support above the vocabulary", R.SUPPORT_BOUNDS, fields(support_policy=65)),
    _step("2.155", "STEP whose temperature changed on the way: the rows are of another context", R.CONTEXT_MISMATCH,
          fields(temperature=0.5), counts=(1, 1)),
    _step("2.156", "STEP whose target context changed on the way", R.CONTEXT_MISMATCH, fields(target_context=1), counts=(1, 1)),
    _step("2.157", "STEP whose depth changed on the way", R.DEPTH_MISMATCH, fields(depth=2), counts=(1, 1)),
    _step("2.158", "STEP whose round changed on the way", R.ROUND_MISMATCH, fields(round=6), counts=(1, 1)),
    _step("2.160", "STEP of the last round there is", R.ROUND_MISMATCH, fields(round=0xFFFFFFFF), counts=(1, 1)),
    _step("2.159", "STEP at temperature 10^6 is within bounds, but another context", R.CONTEXT_MISMATCH,
          fields(temperature=1e6), counts=(1, 1)),
)  # fmt: skip

CASES: Final[tuple[Case, ...]] = (*OPENS, *COMMITS, *STEPS)
