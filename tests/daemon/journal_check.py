"""What a target's journal must be, worked out without any transport: the same models, the same noise, no frames and no daemons.

Between the tests of deployments and `toy.beside.Journal`. Reads files; starts nothing.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pp1q_transport._native.kernels import prefix_digest
from pp1q_transport.rng import Domain, draw24, draw64
from pp1q_transport.toy.models import ToyModels
from pp1q_transport.toy.reference import Mode, propose
from pp1q_transport.toy.rounds import PROMPT
from pp1q_transport.toy.sidecar import Shape
from pp1q_transport.verify import QRow, TargetRow, target_only, verify_chain

Entry = dict[str, Any]


def read_journal(path: Path, start: int = 0) -> tuple[list[Entry], int]:
    """The whole lines from byte `start` on, and where the next one begins. A line that a kill cut short is left out."""
    if not path.exists():
        return [], start
    with path.open("rb") as file:
        file.seek(start)
        data = file.read()
    end = data.rfind(b"\n") + 1
    entries = []
    for line in data[:end].splitlines():
        try:
            entries.append(json.loads(line))
        except ValueError:
            continue  # half a line, and the next life's first one behind it
    return entries, start + end


def rounds_of(path: Path) -> list[Entry]:
    """The rounds of a journal, in order."""
    return [entry for entry in read_journal(path)[0] if "request" in entry]


def histories(entries: Sequence[Entry]) -> dict[int, list[int]]:
    """All tokens of each request; asserts that every round goes on from exactly where the one before ended."""
    known: dict[int, list[int]] = {}
    keys: dict[tuple[int, int, int], Entry] = {}
    for entry in entries:
        tokens = known.setdefault(entry["request"], list(PROMPT))
        assert entry["at"] == len(tokens), f"a round began at {entry['at']}, {len(tokens)} tokens were committed"
        tokens.extend(entry["tokens"])
        if entry.get("drafted") is not None:
            key = (entry["request"], entry["drafted"], entry["number"])
            assert key not in keys, f"noise of {key} was drawn twice: {keys[key]} and {entry}"
            keys[key] = entry
    return known


def rounds_of_all(journals: Sequence[Sequence[Entry]]) -> list[Entry]:
    """Each round once, in order, whichever ranks noted it: a rank that died has some only by agreement with the others."""
    rounds: dict[tuple[int, int], Entry] = {}
    for entry in (entry for journal in journals for entry in journal if not entry.get("adopted")):
        first = rounds.setdefault((entry["request"], entry["at"]), entry)
        assert first["tokens"] == entry["tokens"], f"ranks committed differently: {first} and {entry}"
    return [rounds[key] for key in sorted(rounds)]


def check_tokens(shape: Shape, entries: Sequence[Entry]) -> int:
    """Asserts that every committed token is what its round gives without any transport; returns the tokens checked."""
    models = ToyModels.of(shape.seed, shape.vocab_size)
    mode = Mode.DENSE if shape.support is None else Mode.SPARSE
    known: dict[int, list[int]] = {}
    checked = 0
    for entry in entries:
        number = entry["number"]
        tokens = known.setdefault(entry["request"], list(PROMPT))
        assert entry["at"] == len(tokens), f"request {entry['request']}: nobody noted what stands at {len(tokens)}"
        seed = draw64(shape.seed, Domain.PROPOSAL, 0, 0, entry["request"] - 1)
        if entry["drafted"] is None:
            weights, _ = models.target.weights(tokens[-2:])
            fresh = [target_only(weights, seed, entry["alone"], number, len(tokens))]
        else:
            fresh = _verified(models, mode, shape, tokens, seed, entry["drafted"], number)
        assert fresh == entry["tokens"], f"request {entry['request']} round {number}: {entry['tokens']} are not {fresh}"
        tokens.extend(fresh)
        checked += len(fresh)
    return checked


def _verified(
    models: ToyModels, mode: Mode, shape: Shape, tokens: list[int], seed: int, generation: int, number: int
) -> list[int]:
    first, known = len(tokens), tokens[-2:]
    chain = list(known)
    rows: list[QRow] = []
    for position in range(first, first + shape.depth):
        u24 = draw24(seed, Domain.PROPOSAL, generation, number, position)
        token, row = propose(models.draft.weights(chain), mode, shape.support or 1, u24)
        chain.append(token)
        rows.append(row)

    def target_at(index: int) -> TargetRow:
        return models.target.weights(chain[: len(known) + index])

    verdict = verify_chain(chain[len(known) :], rows, target_at, seed, generation, number, first)
    return list(verdict.committed_tokens)


def digest_of(tokens: Sequence[int]) -> tuple[int, int]:
    """The prefix digest of a whole history (SPEC section 2)."""
    return prefix_digest(0, 0, array("i", tokens))


def agree(ranks: Sequence[Mapping[int, list[int]]]) -> None:
    """Asserts that no two ranks hold different tokens at one position; one may be ahead by what it committed last."""
    for request, tokens in ranks[0].items():
        for other in ranks[1:]:
            theirs = other.get(request, list(PROMPT))
            shared = min(len(tokens), len(theirs))
            assert tokens[:shared] == theirs[:shared], f"request {request}: ranks differ within their first {shared} tokens"
