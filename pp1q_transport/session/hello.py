"""What each side states about itself in HELLO, what such a map may hold, and how two of them must agree.

Between `negotiate` (which exchanges the maps) and nothing: it compares values, and knows neither messages nor sessions.
Nothing is upgraded or downgraded on its own: two HELLOs agree field by field (`FIELDS`), or `Refused` names the field
and both values, before any slot is allocated. SPEC section 2.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import lru_cache
from typing import Final

from ..errors import ConfigError, LocalMisuse, Reason, Refused
from .shards import REPLICATE, VOCABULARY, range_of

Message = dict[str, object]

WIRE_VERSION: Final = 2
SEMANTIC_ID: Final = "dyadic24-standard-v1"
VERIFIER_ID: Final = "standard-rejection-v1"
RNG_ABI: Final = "philox4x32-10-pp1q-1"
REPRESENTATIONS: Final = ("dense", "sparse")
DRAFT_KINDS: Final = ("native", "adapted")
NONCE_BYTES: Final = 16
ROW_ALIGN_BYTES: Final = 64
_IDS_A_PIECE: Final = 16384
TEXT_CHARS: Final = 256  # of an identity; also of each value a REFUSE quotes


class Role(str, Enum):
    """Which end of a session a process is. The leader drafts; the receiver verifies. On a group link rank 0 of a group of
    receivers is its coordinator, the other rank a member; a leader whose draft is tensor-parallel has a link to each of its
    peers. Either end may listen. The order is that of the link's proof."""

    LEADER = "leader"
    RECEIVER = "receiver"
    COORDINATOR = "coordinator"
    MEMBER = "member"
    DRAFT_LEADER = "draft_leader"
    DRAFT_PEER = "draft_peer"

    @property
    def partner(self) -> Role:
        """The role at the other end of the link."""
        return _PARTNERS[self]

    @property
    def sends_rows(self) -> bool:
        """Whether rows travel from this end, whose nonces come first wherever both ends' do. Between drafts no rows travel: the
        peer is asked as a leader is, and stands where one does."""
        return self in (Role.LEADER, Role.COORDINATOR, Role.DRAFT_PEER)

    @property
    def seats_ranks(self) -> bool:
        """Whether this end has a link to each of the other ranks of its group, behind one endpoint; it is rank 0."""
        return self is Role.COORDINATOR or self is Role.DRAFT_LEADER

    @property
    def sits_with_rank_0(self) -> bool:
        """Whether this end is one of those other ranks."""
        return self is Role.MEMBER or self is Role.DRAFT_PEER

    def __str__(self) -> str:
        return self.value


_PARTNERS: Final = {
    Role.LEADER: Role.RECEIVER,
    Role.RECEIVER: Role.LEADER,
    Role.COORDINATOR: Role.MEMBER,
    Role.MEMBER: Role.COORDINATOR,
    Role.DRAFT_LEADER: Role.DRAFT_PEER,
    Role.DRAFT_PEER: Role.DRAFT_LEADER,
}


@lru_cache(maxsize=16)
def identity_map_hash(vocab: int) -> str:
    """SHA-256, in hex, of the little-endian int32 global IDs 0..vocab-1: the map of a vocabulary nobody remapped."""
    digest = hashlib.sha256()
    for start in range(0, vocab, _IDS_A_PIECE):  # all at once they would take forty bytes each as Python integers
        ids = range(start, min(start + _IDS_A_PIECE, vocab))
        digest.update(struct.pack(f"<{len(ids)}i", *ids))
    return digest.hexdigest()


def slot_parts(
    vocab: int, depth: int, support: int, representations: tuple[str, ...] = REPRESENTATIONS
) -> dict[str, int]:
    """Bytes of every part of one slot, headers excluded. Rows: dense = FP32 per token (of the shard, where the vocabulary is
    split), padded up to 64 bytes; sparse = int32 ID + FP32 q per entry. `*_request` is `depth` rows, `tokens` the int32 tokens
    of a proposal."""
    parts = {"tokens": 4 * depth}
    if "dense" in representations:
        row = -(-4 * vocab // ROW_ALIGN_BYTES) * ROW_ALIGN_BYTES
        parts |= {"dense_row": row, "dense_request": depth * row}
    if "sparse" in representations:
        parts |= {"sparse_row": 8 * support, "sparse_request": depth * 8 * support}
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Everything one side states about itself (SPEC section 2, HELLO). Build one with `make_hello`, which checks it."""

    role: Role
    boot_nonce: int  # u64, not 0: this process life
    link_nonce: bytes = bytes(NONCE_BYTES)  # drawn anew by Connector and Listener for each handshake
    wire_version: int = WIRE_VERSION
    semantic_id: str = SEMANTIC_ID
    verifier_id: str = VERIFIER_ID
    rng_abi: str = RNG_ABI
    precision: str = "fp32-le"
    digest: str = "xxh3-64"  # "blake2b-keyed" is known by name; it takes both sides to state it
    draw_proof: bool = True
    representations: tuple[str, ...] = REPRESENTATIONS
    link_kinds: tuple[str, ...] = ("tcp",)
    vocab_size: int = 129280
    id_map_hash: str = field(default_factory=lambda: identity_map_hash(129280))
    draft_identity: str = "unnamed-draft"
    draft_kind: str = "native"
    target_identity: str = "unnamed-target"
    max_slots: int = 8
    depth: int = 5
    support: int = 32
    batch_requests: int = 4
    batches_in_flight: int = 2
    max_context_tokens: int = 131072  # committed tokens of one request, prompt included
    slot_part_bytes: Mapping[str, int] = field(default_factory=lambda: slot_parts(129280, 5, 32))
    group_size: int = 1
    group_mode: str = "replicate"
    rank: int = 0


class Rule(Enum):
    """How the two values of a field must relate."""

    SAME = "same"
    DIFFER = "differ"
    OVERLAP = "overlap"  # at least one common element
    PARTNER = "partner"  # leader and receiver, coordinator and member, or draft_leader and draft_peer
    RANK = "rank"  # the coordinator is 0, a receiver below its group's size, a member too and not 0; leader: `_ranks_fit`


# In the order they are judged; the first difference is the one named. Every field of `Hello` has its row.
FIELDS: Final[tuple[tuple[str, Reason, Rule], ...]] = (
    ("wire_version", Reason.BAD_VERSION, Rule.SAME),
    ("role", Reason.SEMANTIC_MISMATCH, Rule.PARTNER),
    ("boot_nonce", Reason.BOOT_NONCE, Rule.DIFFER),  # equal: we are talking to ourselves, or to a reflection
    ("link_nonce", Reason.AUTH_FAILED, Rule.DIFFER),
    ("semantic_id", Reason.SEMANTIC_MISMATCH, Rule.SAME),
    ("verifier_id", Reason.SEMANTIC_MISMATCH, Rule.SAME),
    ("rng_abi", Reason.SEMANTIC_MISMATCH, Rule.SAME),
    ("precision", Reason.SEMANTIC_MISMATCH, Rule.SAME),
    ("digest", Reason.SEMANTIC_MISMATCH, Rule.SAME),
    ("draw_proof", Reason.SEMANTIC_MISMATCH, Rule.SAME),
    ("representations", Reason.SEMANTIC_MISMATCH, Rule.SAME),
    ("link_kinds", Reason.SEMANTIC_MISMATCH, Rule.OVERLAP),
    ("group_mode", Reason.SEMANTIC_MISMATCH, Rule.SAME),
    ("draft_identity", Reason.IDENTITY_MISMATCH, Rule.SAME),
    ("draft_kind", Reason.IDENTITY_MISMATCH, Rule.SAME),
    ("target_identity", Reason.IDENTITY_MISMATCH, Rule.SAME),
    ("vocab_size", Reason.LIMITS_MISMATCH, Rule.SAME),
    ("id_map_hash", Reason.IDENTITY_MISMATCH, Rule.SAME),
    ("max_slots", Reason.LIMITS_MISMATCH, Rule.SAME),
    ("depth", Reason.LIMITS_MISMATCH, Rule.SAME),
    ("support", Reason.LIMITS_MISMATCH, Rule.SAME),
    ("batch_requests", Reason.LIMITS_MISMATCH, Rule.SAME),
    ("batches_in_flight", Reason.LIMITS_MISMATCH, Rule.SAME),
    ("max_context_tokens", Reason.LIMITS_MISMATCH, Rule.SAME),
    ("slot_part_bytes", Reason.LIMITS_MISMATCH, Rule.SAME),
    ("group_size", Reason.LIMITS_MISMATCH, Rule.SAME),
    ("rank", Reason.LIMITS_MISMATCH, Rule.RANK),
)

# What a HELLO map may hold at all, before the two sides are compared: name -> smallest and largest integer.
_INTEGERS: Final[dict[str, tuple[int, int]]] = {
    "boot_nonce": (1, (1 << 64) - 1),
    "vocab_size": (1, 1 << 24),
    "max_slots": (1, 4096),
    "depth": (1, 32),
    "support": (1, 1 << 16),
    "batch_requests": (1, 1024),
    "batches_in_flight": (1, 64),
    "max_context_tokens": (1, 1 << 24),
    "group_size": (1, 1024),
    "rank": (0, 1023),
}
_TEXTS: Final = (
    "semantic_id", "verifier_id", "rng_abi", "precision", "digest", "draft_identity", "target_identity", "group_mode"
)  # fmt: skip
_CHOICES: Final[dict[str, tuple[str, ...]]] = {"role": tuple(Role), "draft_kind": DRAFT_KINDS}
_LISTS: Final[dict[str, int]] = {"representations": len(REPRESENTATIONS), "link_kinds": 8}  # name -> longest
_NAMES: Final = tuple(item.name for item in fields(Hello))


def _bad(name: str, expected: str, value: object, reason: Reason = Reason.MALFORMED) -> Refused:
    return Refused(reason, name, expected, quote(value))


def quote(value: object) -> str:
    """A value as a refusal may show it: short, printable, whatever a peer put there."""
    text = value if isinstance(value, str) else value.hex() if isinstance(value, bytes) else str(value)
    text = "".join(char if char.isprintable() else "?" for char in text[:TEXT_CHARS])
    return text if len(text) < TEXT_CHARS else text[: TEXT_CHARS - 3] + "..."


def to_map(hello: Hello) -> Message:
    """The map that travels: field name -> int, bool, str, bytes, list of str, or (slot_part_bytes) map of int."""
    plain: Message = {}
    for name in _NAMES:
        value = getattr(hello, name)
        if isinstance(value, tuple):
            value = list(value)
        elif isinstance(value, Mapping):
            value = dict(value)
        elif isinstance(value, Role):
            value = value.value
        plain[name] = value
    return plain


def parse_hello(mapping: Mapping[str, object]) -> Hello:
    """The `Hello` of a peer's map. Raises `Refused` (a `PeerFault`): `bad_version` for another wire version, judged
    before anything else is looked at; `malformed` for keys or types; `limits_mismatch` for an integer out of range."""
    judge_version(mapping)
    if set(mapping) != set(_NAMES):
        odd = sorted(quote(name) for name in set(mapping) ^ set(_NAMES))
        found = "missing" if odd[0] in _NAMES else "an unknown field"
        raise _bad(odd[0], "exactly the fields of a version 2 HELLO", found)
    for name, (low, high) in _INTEGERS.items():
        value = mapping[name]
        if type(value) is not int:
            raise _bad(name, "an integer", value)
        if not low <= value <= high:
            raise _bad(name, f"{low}..{high}", value, Reason.LIMITS_MISMATCH)
    for name in _TEXTS:
        _text(name, mapping[name])
    for name, choices in _CHOICES.items():
        if _text(name, mapping[name]) not in choices:
            raise _bad(name, " or ".join(choices), mapping[name])
    if type(mapping["draw_proof"]) is not bool:
        raise _bad("draw_proof", "true or false", mapping["draw_proof"])
    nonce, digest = mapping["link_nonce"], _text("id_map_hash", mapping["id_map_hash"])
    if type(nonce) is not bytes or len(nonce) != NONCE_BYTES:
        raise _bad("link_nonce", f"{NONCE_BYTES} bytes", nonce)
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise _bad("id_map_hash", "64 lower-case hex digits", digest)
    values = dict(mapping) | {name: _list(name, mapping[name], longest) for name, longest in _LISTS.items()}
    values |= {"role": Role(str(mapping["role"])), "slot_part_bytes": _parts(mapping["slot_part_bytes"])}
    hello = Hello(**values)  # type: ignore[arg-type]  # every value was checked above
    _judge_limits(hello)
    return hello


def judge_version(mapping: Mapping[str, object]) -> None:
    """Raises `Refused(bad_version)` unless the map states our wire version. Looks at nothing else: every other key of
    another version's HELLO may mean something else."""
    version = mapping.get("wire_version", "none stated")
    if version != WIRE_VERSION or type(version) is not int:
        shown = version if type(version) is int else quote(version)
        raise Refused(Reason.BAD_VERSION, "wire_version", WIRE_VERSION, shown)


def _text(name: str, value: object) -> str:
    if type(value) is not str or not 1 <= len(value) <= TEXT_CHARS or not value.isprintable():
        raise _bad(name, f"1..{TEXT_CHARS} printable characters", value)
    return value


def _list(name: str, value: object, longest: int) -> tuple[str, ...]:
    if type(value) is not list or not 1 <= len(value) <= longest:
        raise _bad(name, f"a list of 1..{longest} names", value)
    names = tuple(_text(name, item) for item in value)
    if len(set(names)) != len(names):
        raise _bad(name, "no name twice", value)
    if name == "representations" and names != tuple(item for item in REPRESENTATIONS if item in names):
        raise _bad(name, "dense, sparse or both, in that order", value)
    return names


def _parts(value: object) -> dict[str, int]:
    if type(value) is not dict or not 1 <= len(value) <= 16:
        raise _bad("slot_part_bytes", "a map of 1..16 parts", value)
    for part, size in value.items():
        _text("slot_part_bytes", part)
        if type(size) is not int:
            raise _bad("slot_part_bytes", "integers", value)
        if not 1 <= size <= 1 << 40:
            raise _bad("slot_part_bytes", f"1..{1 << 40}", value, Reason.LIMITS_MISMATCH)
    return value


def _judge_limits(hello: Hello) -> None:
    """Limits of one HELLO that contradict each other, whoever it is from."""
    if hello.max_slots < hello.batch_requests * hello.batches_in_flight:
        least = f">= {hello.batch_requests} requests x {hello.batches_in_flight} batches"
        raise _bad("max_slots", least, hello.max_slots, Reason.LIMITS_MISMATCH)
    if hello.support > hello.vocab_size:
        raise _bad("support", f"<= vocab_size {hello.vocab_size}", hello.support, Reason.LIMITS_MISMATCH)


def make_hello(role: Role, boot_nonce: int, **options: object) -> Hello:
    """A checked `Hello`; `id_map_hash` and `slot_part_bytes` follow from the other options unless given. Raises
    `ConfigError`."""
    unknown = sorted(set(options) - set(_NAMES))
    if unknown:
        raise ConfigError(f"HELLO has no field {unknown[0]!r}")
    draft = Hello(role=role, boot_nonce=boot_nonce, **options)  # type: ignore[arg-type]  # checked by parse_hello below
    try:
        if "id_map_hash" not in options and type(draft.vocab_size) is int and 1 <= draft.vocab_size <= 1 << 24:
            draft = replace(draft, id_map_hash=identity_map_hash(draft.vocab_size))
        if "slot_part_bytes" not in options:
            parts = slot_parts(held_tokens(draft), draft.depth, draft.support, draft.representations)
            draft = replace(draft, slot_part_bytes=parts)
        return parse_hello(to_map(draft))
    except Refused as fault:
        raise ConfigError(f"{fault.field} must be {fault.ours}, not {fault.theirs}") from None
    except TypeError as fault:
        raise ConfigError(f"HELLO options have a wrong type: {fault}") from None


def held_range(hello: Hello) -> tuple[int, int]:
    """[first, end) of the vocabulary whose rows travel on the link of this HELLO: a rank's range in mode "vocabulary" on the
    links of the leader, else all of it. Raises `LocalMisuse` when it can't be split so."""
    if hello.role in (Role.LEADER, Role.RECEIVER) and hello.group_mode == VOCABULARY and hello.rank < hello.group_size:
        return range_of(hello.group_mode, hello.vocab_size, hello.group_size, hello.rank)
    return 0, hello.vocab_size


def held_tokens(hello: Hello) -> int:
    """How many tokens `held_range` has; the whole vocabulary's where it can't be split (another check names that)."""
    try:
        first, end = held_range(hello)
    except LocalMisuse:
        return hello.vocab_size
    return end - first


def _holds(rule: Rule, name: str, ours: Hello, theirs: Hello) -> bool:
    mine, other = getattr(ours, name), getattr(theirs, name)
    if rule is Rule.SAME:
        return bool(mine == other)
    if rule is Rule.DIFFER:
        return bool(mine != other)
    if rule is Rule.OVERLAP:
        return bool(set(mine) & set(other))
    if rule is Rule.PARTNER:
        return ours.role.partner is theirs.role
    return _ranks_fit(ours, theirs) and all(_rank_fits(hello) for hello in (ours, theirs))


def _ranks_fit(ours: Hello, theirs: Hello) -> bool:
    """A leader states the rank that it faces where every rank has a link of its own to it, and 0 where rank 0 alone has one."""
    leader = next((hello for hello in (ours, theirs) if hello.role is Role.LEADER), None)
    if leader is None or leader.group_mode == REPLICATE:
        return leader is None or leader.rank == 0
    return ours.rank == theirs.rank


def _rank_fits(hello: Hello) -> bool:
    return hello.rank in _ranks(hello)


def _ranks(hello: Hello) -> range:
    """The ranks that a side of this role may have in a group of this size."""
    if hello.role.seats_ranks:
        return range(1)
    return range(1 if hello.role.sits_with_rank_0 else 0, hello.group_size)


def _ranks_wanted(hello: Hello) -> int | str:
    """`_ranks`, in words where there are several: what a refusal says is wanted, where our own rank tells nothing of it."""
    ranks = _ranks(hello)
    if not ranks:
        return f"none in a group of {hello.group_size}"
    return ranks[0] if len(ranks) == 1 else f"{ranks[0]}..{ranks[-1]}"


def check(ours: Hello, theirs: Hello) -> None:
    """Compares every field by its rule; raises `Refused(reason, field, ours, theirs)` for the first that fails."""
    for name, reason, rule in FIELDS:
        if not _holds(rule, name, ours, theirs):
            wanted: object = getattr(ours, name)
            if rule is Rule.RANK and not _rank_fits(theirs):
                wanted = _ranks_wanted(theirs)
            raise Refused(reason, name, wanted, getattr(theirs, name))


_ADOPTED: Final = (
    "vocab_size", "max_slots", "depth", "support", "batch_requests", "batches_in_flight", "max_context_tokens"
)  # fmt: skip


def adopt(ours: Hello, theirs: Hello) -> Hello:
    """`ours` with the sizes that the other side proposes, where ours are the maxima (a benchmark's receiver, SPEC 9).
    Raises `Refused` for a size above its maximum or a representation we do not offer; `check` still compares all."""
    for name in _ADOPTED:
        if getattr(theirs, name) > getattr(ours, name):
            raise Refused(Reason.LIMITS_MISMATCH, name, f"at most {getattr(ours, name)}", getattr(theirs, name))
    if not set(theirs.representations) <= set(ours.representations):
        raise Refused(Reason.SEMANTIC_MISMATCH, "representations", ours.representations, theirs.representations)
    sizes = {name: getattr(theirs, name) for name in _ADOPTED}
    parts = slot_parts(theirs.vocab_size, theirs.depth, theirs.support, theirs.representations)
    taken = replace(ours, **sizes, representations=theirs.representations, slot_part_bytes=parts)
    return replace(taken, id_map_hash=identity_map_hash(taken.vocab_size))
