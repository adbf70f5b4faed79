"""The valid frames: three small sessions told from OPEN to CLOSE, every frame with what led up to it.

Between `encoder` and `make_golden`. Everything is fixed here: nonces, seeds, tokens, counts. Draws follow from the
seeds.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from . import encoder as enc
from .encoder import Frame

VERIFIED = 1
TARGET_ONLY = 2
DENSE = 1
SPARSE = 2
CANCELLED = 40
TIMEOUT = 39
KEY_REUSE = 44
LINK_ERROR = 42


@dataclass(frozen=True)
class Session:
    """The terms of one session, as `sessions.json` states them."""

    name: str
    vocab_size: int
    depth: int
    support: int
    max_slots: int
    max_context_tokens: int
    session: int
    leader_nonce: int
    receiver_nonce: int
    request: int
    request_seed: int
    prompt: tuple[int, ...]
    dense: bool = True
    sparse: bool = True
    group_mode: str = "replicate"

    @property
    def dense_row_bytes(self) -> int:
        """Bytes of a dense row, padding included."""
        return -(-4 * self.vocab_size // 64) * 64

    @property
    def max_payload(self) -> int:
        """The largest payload any frame of the session may carry to the receiver."""
        return max(self.dense_row_bytes, 8 * self.support, 4 * self.max_context_tokens)


@dataclass(frozen=True)
class Vector:
    """One golden frame: how it is encoded, who gets it after what, and what must come of it."""

    name: str
    summary: str
    session: Session
    to: str  # receiver | leader | draft_peer | member | coordinator | listener_port | connector_link
    frame: Frame
    before: tuple[str, ...] = ()
    effect: str = ""  # of a valid frame
    detail: Mapping[str, Any] = field(default_factory=dict)  # the payload's meaning, digests behind the header's fields
    reason: str = ""  # of an invalid one
    cost: str = ""  # link | proposal | step | frame
    now_us: int = 0  # after the session's start
    stored: bool = True  # False: the payload is a recipe, only the header is in the .bin file


V64 = Session(
    "v64", 64, 3, 8, 4, 64, 0x5E5510D0_00000064, 0x1EADE400_0B007001, 0x4ECE1BE4_0B007002, 0x0102030405060708,
    0xC0FFEE00_D15EA5E5, (5, 17, 63, 0, 42),
)  # fmt: skip
V100 = Session(
    "v100", 100, 1, 8, 2, 16, 0x5E5510D0_00000100, 0x1EADE400_0B007011, 0x4ECE1BE4_0B007012, 0x1112131415161718,
    0xFEEDFACE_CAFEBEEF, (99, 1, 7), sparse=False,
)  # fmt: skip
FULL = Session(
    "full", 129280, 1, 32, 1, 16, 0x5E5510D0_00129280, 0x1EADE400_0B007021, 0x4ECE1BE4_0B007022, 0x2122232425262728,
    0x01234567_89ABCDEF, (129279, 0, 100000),
)  # fmt: skip
THIN = Session(
    "thin", 4096, 1, 8, 2, 16, 0x5E5510D0_00004096, 0x1EADE400_0B007031, 0x4ECE1BE4_0B007032, 0x3132333435363738,
    0xFEDCBA98_76543210, (4095,), dense=False,
)  # fmt: skip
SESSIONS = (V64, V100, FULL, THIN)

RECIPE = {"factor": 40503, "modulus": 256, "rest_to": 0}


def recipe_counts(vocab: int) -> list[int]:
    """count(v) = v * factor mod modulus; token `rest_to` gets what is missing to 2^24."""
    counts = [v * RECIPE["factor"] % RECIPE["modulus"] for v in range(vocab)]
    counts[RECIPE["rest_to"]] += enc.MASS - sum(counts)
    return counts


def dense_counts(vocab: int, salt: int) -> list[int]:
    """Every third count is zero, the others between about a tenth and twice the mean."""
    return enc.counts_to_mass([0 if (v + salt) % 3 == 0 else 50 + (v * 7919 + salt * 977) % 1021 for v in range(vocab)])


SPARSE_ROWS: tuple[dict[int, int], ...] = (
    {0: 11, 7: 200, 19: 35, 40: 3, 63: 900},
    {2: 1, 3: 50, 10: 9, 11: 400, 30: 70, 31: 2, 62: 5, 63: 31},
)


class Story:
    """Builds the frames of one session in order. `tokens` is the committed prefix so far."""

    def __init__(self, session: Session, request_generation: int) -> None:
        self.session = session
        self.generation = request_generation
        self.tokens = list(session.prompt)

    def blank(self, kind: str, by: str, **fields: Any) -> Frame:
        """A frame of `by` with the session's identities in it."""
        s = self.session
        nonce = s.leader_nonce if by == "leader" else s.receiver_nonce
        return Frame(kind, s.leader_nonce, {"boot_nonce": nonce, "session": s.session, **fields})

    def of_request(self, kind: str, by: str, **fields: Any) -> Frame:
        """A frame about the session's request."""
        return self.blank(
            kind, by, request=self.session.request, request_generation=self.generation, **fields
        )  # fmt: skip

    def _prefix(self) -> dict[str, int]:
        low, high = enc.prefix_digest(self.tokens)
        return {"prefix_low": low, "prefix_high": high, "position": len(self.tokens) - 1}

    def open(self, max_position: int) -> Frame:
        """OPEN with the prompt."""
        frame = self.of_request(
            "OPEN", "receiver", **self._prefix(), seed=self.session.request_seed, max_position=max_position,
            token_count=len(self.tokens),
        )  # fmt: skip
        return replace(frame, payload=enc.tokens_payload(self.tokens))

    def step(self, **fields: Any) -> Frame:
        """STEP from the committed prefix."""
        return self.of_request("STEP", "receiver", **self._prefix(), **fields)

    def commit(self, round_: int, accepted: int, source: int, tokens: list[int]) -> Frame:
        """COMMIT; the prefix moves on."""
        self.tokens += tokens
        frame = self.of_request(
            "COMMIT", "receiver", **self._prefix(), round=round_, accepted=accepted, source=source,
            token_count=len(tokens),
        )  # fmt: skip
        return replace(frame, payload=enc.tokens_payload(tokens))

    def about(self, kind: str, by: str, step: Frame, **fields: Any) -> Frame:
        """A frame that names the generation of `step`."""
        same = ("request_generation", "slot", "slot_generation", "round")
        return self.of_request(kind, by).but(**{name: step.fields[name] for name in same}, **fields)

    def reply(self, step: Frame, row: int, ids: list[int] | None, counts: list[int]) -> tuple[Frame, dict[str, Any]]:
        """REPLY `row` of `step`, its token drawn, and what its payload means."""
        f = step.fields
        position = f["position"] + 1 + row
        u24 = enc.proposal_u24(self.session.request_seed, f["request_generation"], f["round"], position)
        drawn = enc.draw(counts, u24)
        frame = self.about(
            "REPLY", "leader", step, position=position, depth=f["depth"], representation=f["representation"],
            entry_count=len(counts), token=drawn if ids is None else ids[drawn], context=enc.context_digest(f),
            end_id=self.session.vocab_size, shard_mass=enc.MASS,
        )  # fmt: skip
        payload = enc.dense_payload(counts) if ids is None else enc.sparse_payload(ids, counts)
        meaning: dict[str, Any] = {"u24": u24, "counts": counts}
        if ids is None:
            meaning["padding_bytes"] = len(payload) - 4 * len(counts)
        else:
            meaning["ids"] = ids
        return replace(frame, payload=payload), meaning

    def completion(self, step: Frame, replies: list[Frame]) -> tuple[Frame, dict[str, Any]]:
        """COMPLETION over `replies`, and the entries its digest covers."""
        entries = [(r.fields["position"], len(r.payload), r.digest_of_payload()) for r in replies]
        packed = b"".join(struct.pack("<IIQ", *entry) for entry in entries)
        frame = self.about(
            "COMPLETION", "leader", step, position=step.fields["position"], depth=step.fields["depth"],
            reply_size=sum(size for _, size, _ in entries), context=enc.context_digest(step.fields),
            reply_digest=enc.xxh3(packed), positions=len(entries),
        )  # fmt: skip
        named = [{"position": p, "size": n, "payload_digest": f"0x{d:016x}"} for p, n, d in entries]
        return frame, {"entries": named}


def _v64() -> list[Vector]:
    tale = Story(V64, 3)
    out: list[Vector] = []

    def tell(
        name: str, to: str, frame: Frame, effect: str, summary: str, before: tuple[str, ...], **detail: Any
    ) -> Frame:
        out.append(Vector(name, summary, V64, to, frame, before, effect, detail))
        return frame

    opened = ("open",)
    tell("open", "leader", tale.open(60), "opened", "A request with a prompt of five tokens.", (),
         tokens=list(V64.prompt))  # fmt: skip
    step = tale.step(round=9, slot=2, slot_generation=7, depth=3, representation=DENSE, support_policy=0,
                     temperature=0.75, target_context=0xA1A2A3A4A5A6A7A8, trace_id=0xB1B2B3B4B5B6B7B8,
                     budget_us=250_000)  # fmt: skip
    tell("step_dense", "leader", step, "granted", "Grants slot 2 for three dense rows.", opened)
    seen: tuple[str, ...] = (*opened, "step_dense")
    replies = []
    for row in range(3):
        frame, meaning = tale.reply(step, row, None, dense_counts(64, row))
        name = f"reply_dense_{row}"
        replies.append(tell(name, "receiver", frame, "row_landed", f"Dense row {row} of step_dense.", seen, **meaning))
        seen = (*seen, name)
    frame, meaning = tale.completion(step, replies)
    tell("completion_dense", "receiver", frame, "ready", "All three rows are in: the proposal becomes ready.", seen,
         **meaning)  # fmt: skip
    seen = (*seen, "completion_dense")
    _notices(tale, step, tell)
    drafted = [reply.fields["token"] for reply in replies]
    tokens = [*drafted[:2], (drafted[2] + 1) % 64]
    tell("commit_verified", "leader", tale.commit(9, 2, VERIFIED, tokens), "committed",
         "Two drafts were accepted; the third token is the correction.", seen, tokens=tokens)  # fmt: skip
    seen = (*seen, "commit_verified")
    _sparse(tale, tell, seen)
    return out


def _notices(tale: Story, step: Frame, tell: Any) -> None:
    granted = ("open", "step_dense")
    landing = (*granted, "reply_dense_0")
    notice = {"subject": enc.KINDS["STEP"]}
    tell("reset_to_leader", "leader", tale.about("RESET", "receiver", step, **notice, status=TIMEOUT), "reset",
         "The receiver gave the proposal up: its budget was spent.", granted)  # fmt: skip
    tell("cancel_to_leader", "leader", tale.about("CANCEL", "receiver", step, **notice, status=CANCELLED), "reset",
         "The receiver no longer wants the proposal.", granted)  # fmt: skip
    tell("reset_to_receiver", "receiver", tale.about("RESET", "leader", step, **notice, status=LINK_ERROR),
         "discarded:link_error", "The leader declares the generation dead when a row has landed.", landing)  # fmt: skip
    tell("cancel_to_receiver", "receiver", tale.about("CANCEL", "leader", step, **notice, status=CANCELLED),
         "discarded:cancelled", "The leader gives the proposal up.", granted)  # fmt: skip
    tell("status_step", "receiver", tale.about("STATUS", "leader", step, **notice, status=KEY_REUSE),
         "discarded:key_reuse", "The leader refuses a STEP and names it.", granted)  # fmt: skip
    tell("status_link_to_receiver", "receiver", tale.blank("STATUS", "leader", status=LINK_ERROR), "noted",
         "A failure that belongs to no proposal (slot_generation 0).", granted)  # fmt: skip
    tell("status_link_to_leader", "leader", tale.blank("STATUS", "receiver", status=LINK_ERROR), "noted",
         "A failure that belongs to no proposal.", granted)  # fmt: skip
    token = tale.about("TOKEN", "receiver", step, position=5, token=17, context=enc.context_digest(step.fields))
    tell("token", "draft_peer", token, "told",
         "The token drawn for position 5; here the session's receiver is the draft's leader, its leader the peer.", granted)
    tell("commit_target_only", "leader", _target_only(tale), "committed",
         "No proposal was used: the target's own token alone.", granted, tokens=[33])  # fmt: skip
    tell("close", "leader", tale.of_request("CLOSE", "receiver"), "closed", "The request ended.", ("open",))


def _target_only(tale: Story) -> Frame:
    """Told from the prompt; the story's own prefix stays."""
    aside = Story(tale.session, tale.generation)
    return aside.commit(9, 0, TARGET_ONLY, [33])


def _sparse(tale: Story, tell: Any, seen: tuple[str, ...]) -> None:
    step = tale.step(round=10, slot=3, slot_generation=1, depth=2, representation=SPARSE, support_policy=8,
                     temperature=1.0, target_context=0, trace_id=1, budget_us=1_000_000)  # fmt: skip
    tell("step_sparse", "leader", step, "granted", "Grants slot 3 for two sparse rows of at most 8 entries.", seen)
    seen = (*seen, "step_sparse")
    replies = []
    for row, entries in enumerate(SPARSE_ROWS):
        counts = enc.counts_to_mass(list(entries.values()))
        frame, meaning = tale.reply(step, row, list(entries), counts)
        name = f"reply_sparse_{row}"
        replies.append(
            tell(name, "receiver", frame, "row_landed", f"Sparse row {row} of step_sparse.", seen, **meaning)
        )
        seen = (*seen, name)
    frame, meaning = tale.completion(step, replies)
    tell("completion_sparse", "receiver", frame, "ready", "Both rows are in.", seen, **meaning)


def _single(session: Session, counts: list[int], ids: list[int] | None = None, stored: bool = True) -> list[Vector]:
    """OPEN, STEP, one row (sparse with `ids`) and COMPLETION of a further vocabulary."""
    suffix = session.name
    tale = Story(session, 1)
    names = [f"{kind}_{suffix}" for kind in ("open", "step", "reply", "completion")]
    representation, policy = (DENSE, 0) if ids is None else (SPARSE, session.support)
    step = tale.step(round=0, slot=0, slot_generation=1, depth=1, representation=representation, support_policy=policy,
                     temperature=1.0, target_context=0, trace_id=0, budget_us=1_000_000)  # fmt: skip
    reply, meaning = tale.reply(step, 0, ids, counts)
    if not stored:
        meaning["recipe"] = RECIPE
        del meaning["counts"]
    done, entries = tale.completion(step, [reply])
    size = f"a vocabulary of {session.vocab_size}"
    if ids is None:
        size += f" ({session.dense_row_bytes - 4 * session.vocab_size} padding bytes)"
    return [
        Vector(names[0], f"A request over {size}.", session, "leader", tale.open(2**32 - 1), (), "opened",
               {"tokens": list(session.prompt)}),
        Vector(names[1], "Grants slot 0 for one row.", session, "leader", step, tuple(names[:1]), "granted"),
        Vector(names[2], f"The row over {size}.", session, "receiver", reply, tuple(names[:2]), "row_landed",
               meaning, stored=stored),
        Vector(names[3], "The proposal of one row becomes ready.", session, "receiver", done, tuple(names[:3]), "ready",
               entries),
    ]  # fmt: skip


def valid() -> list[Vector]:
    """Every valid data-plane vector but the proofs, in an order in which `before` names only earlier ones."""
    return [
        *_v64(),
        *_single(V100, dense_counts(100, 1)),
        *_single(FULL, recipe_counts(FULL.vocab_size), stored=False),
        *_single(THIN, enc.counts_to_mass([1, 2, 3, 4, 5, 6, 7, 8]), ids=[0, 1, 77, 78, 1000, 2047, 4094, 4095]),
    ]
