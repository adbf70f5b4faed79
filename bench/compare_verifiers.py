"""Our verifier beside two that others wrote, on the same p and q: vLLM's `rejection_sample` on a CPU and transformers' own.

Between `verify_chain_fast` and theirs on one side and the exact law of the outcome on the other. Judges frequencies, no times.
`make compare-verifiers` installs theirs; `--only ours` needs neither. Exit status 0: every frequency is within its bound.

Each share of outcomes in a *cell* (so many drafts kept; this first token; this second token, where one was kept; this correction,
where the first or the second draft was not) is compared with its law, and with the other verifiers'. With n draws a share is off
by more than e with a chance of at most 2 exp(-2 n e^2) (Hoeffding), the difference of two with 2 exp(-2 e^2 / (1/n + 1/m)); e is
such that all comparisons together fail wrongly with a chance of at most 1e-6.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pp1q_transport import dyadic
from pp1q_transport.cli._common import StageLine
from pp1q_transport.verify import QRow, verify_chain_fast

DEPTH = 2
FALSE_FAILURES = 1e-6
LIKELY = 0.01  # tokens whose share is a cell of its own
NAMES = ("ours", "vllm", "transformers")
DRAWS = {"ours": 60_000, "vllm": 200_000, "transformers": 20_000}
WIDE_SHARE = 40  # the case of a whole vocabulary gets so many times fewer


@dataclass
class Case:
    """`p` float32 [DEPTH + 1, V] and `q` float32 [DEPTH, V], dyadic, rows that sum to 1; they depend on no context."""

    name: str
    p: NDArray[np.float32]
    q: NDArray[np.float32]

    @property
    def vocabulary(self) -> int:
        return self.p.shape[1]


@dataclass
class Outcomes:
    """`kept` int [n]: how many drafts were; `tokens` int [n, DEPTH + 1]: what came out, -1 behind the end."""

    kept: NDArray[np.int64]
    tokens: NDArray[np.int64]


Verifier = Callable[[Case, NDArray[np.int64], int], Outcomes]


# ---- cases ----------------------------------------------------------------------------------------------------------


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    weights: NDArray[np.float64] = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def dyadic_rows(weights: NDArray[np.float64], support: int | None = None) -> NDArray[np.float32]:
    rows = np.zeros(weights.shape, np.float32)
    for row, given in zip(rows, weights, strict=True):
        if support is None:
            row[:] = dyadic.to_q(dyadic.allocate(given))
        else:
            ids, counts = dyadic.allocate_top_k(given, support)
            row[ids] = dyadic.to_q(counts)
    return rows


def cases() -> list[Case]:
    """Six kinds of (p, q), from a fixed seed."""
    noise = np.random.default_rng(20)

    def logits(size: int, scale: float) -> NDArray[np.float64]:
        return noise.normal(size=(DEPTH + 1, size)) * scale

    def case(name: str, p: NDArray[np.float64], q: NDArray[np.float64], support: int | None = None) -> Case:
        return Case(name, p.astype(np.float32), dyadic_rows(q[:DEPTH], support))

    both = logits(32, 2.0)
    masked = softmax(logits(12, 1.5)) * np.where(np.arange(12) % 3 == 1, 0.0, 1.0)
    masked /= masked.sum(axis=-1, keepdims=True)
    same = dyadic_rows(softmax(logits(16, 1.5))).astype(np.float64)
    wide = logits(50_000, 3.0)
    return [
        case("unlike", softmax(logits(8, 1.5)), softmax(logits(8, 1.5))),
        case("near", softmax(both), softmax(both + noise.normal(size=both.shape) / 2)),
        case("sparse q", softmax(logits(16, 1.5)), softmax(logits(16, 1.5)), 4),
        case("p forbids", masked, softmax(logits(12, 1.0))),
        case("p = q", same, same),
        case("whole vocabulary", softmax(wide), softmax(wide + noise.normal(size=wide.shape) / 2)),
    ]


def draft(case: Case, draws: int, seed: int) -> NDArray[np.int64]:
    """int [draws, DEPTH]: drafts from q."""
    noise = np.random.default_rng(seed)
    columns = [np.searchsorted(np.cumsum(row.astype(np.float64)), noise.random(draws), side="right") for row in case.q]
    return np.stack(columns, 1)


# ---- verifiers ------------------------------------------------------------------------------------------------------


def ours(case: Case, drafts: NDArray[np.int64], seed: int) -> Outcomes:
    """`verify_chain_fast`, a call a draw."""
    rows = [QRow(row) for row in case.q]
    kept = np.zeros(len(drafts), np.int64)
    tokens = np.full((len(drafts), DEPTH + 1), -1, np.int64)
    for number, pair in enumerate(drafts.tolist()):
        verdict = verify_chain_fast(pair, rows, case.p.__getitem__, seed, 0, number, 1)
        kept[number] = verdict.accepted_drafts
        tokens[number, : len(verdict.committed_tokens)] = verdict.committed_tokens
    return Outcomes(kept, tokens)


def theirs_transformers(case: Case, drafts: NDArray[np.int64], seed: int) -> Outcomes:
    """Hugging Face transformers' `_speculative_sampling`: one request a call, logits in, a bonus drawn inside."""
    import torch
    from transformers.generation.utils import _speculative_sampling

    torch.manual_seed(seed)
    p, q = torch.from_numpy(case.p).log()[None], torch.from_numpy(case.q).log()[None]
    kept = np.zeros(len(drafts), np.int64)
    tokens = np.full((len(drafts), DEPTH + 1), -1, np.int64)
    for number, pair in enumerate(torch.from_numpy(drafts)):
        valid, matches = _speculative_sampling(pair[None], q, DEPTH, p)
        kept[number] = int(matches)
        tokens[number, : valid.shape[1]] = valid[0].numpy()
    return Outcomes(kept, tokens)


def theirs_vllm(case: Case, drafts: NDArray[np.int64], seed: int) -> Outcomes:
    """vLLM's `rejection_sample` with draft probabilities: requests in a batch, the bonus tokens drawn by the caller."""
    sampler, metadata = vllm_sampler()
    import torch

    torch.manual_seed(seed)
    p, q = torch.from_numpy(case.p), torch.from_numpy(case.q)
    batch = max(1, min(len(drafts), 4_000_000 // case.vocabulary))
    made = []
    for start in range(0, len(drafts), batch):
        own = torch.from_numpy(drafts[start : start + batch])
        size = len(own)
        bonus = torch.multinomial(p[DEPTH], size, replacement=True).view(size, 1)
        made.append(
            sampler.rejection_sample(
                own.reshape(-1).to(torch.int32),
                [DEPTH] * size,
                DEPTH,
                torch.arange(1, size + 1, dtype=torch.int32) * DEPTH,
                q.repeat(size, 1).contiguous(),
                p[:DEPTH].log().repeat(size, 1).contiguous(),
                bonus,
                metadata(size),
            ).numpy()
        )
    tokens = np.concatenate(made).astype(np.int64)
    return Outcomes((tokens >= 0).sum(1) - 1, tokens)


@functools.cache
def vllm_sampler() -> tuple[Any, Callable[[int], Any]]:
    """vLLM's module, with the CPU forms of its kernels in place, and what makes metadata for a batch at temperature 1."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning)
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    def metadata(size: int) -> Any:
        return SamplingMetadata(
            temperature=torch.ones(size), all_greedy=False, all_random=True, top_p=None, top_k=None, generators={},
            max_num_logprobs=None, no_penalties=True, prompt_token_ids=None, frequency_penalties=torch.zeros(size),
            presence_penalties=torch.zeros(size), repetition_penalties=torch.ones(size), output_token_ids=[[]] * size,
            spec_token_ids=[[]] * size, allowed_token_ids_mask=None, bad_words_token_ids={}, logitsprocs=LogitsProcessors(),
        )  # fmt: skip

    return rejection_sampler, metadata


def vllm_loses_temperatures() -> bool:
    """Whether vLLM's own preparation of logits on a CPU drops the temperature of each request: why it gets p as it is here."""
    sampler, _ = vllm_sampler()
    import torch

    given = torch.tensor([0.5, 2.0])
    made = sampler.expand_batch_to_tokens(given, torch.tensor([1, 3], dtype=torch.int32), 3)
    return not torch.equal(made, torch.tensor([0.5, 2.0, 2.0]))


VERIFIERS: dict[str, Verifier] = {"ours": ours, "vllm": theirs_vllm, "transformers": theirs_transformers}


# ---- the law, and the judgement -------------------------------------------------------------------------------------


@dataclass
class Cell:
    """A share of outcomes: `hits` of `n` (those that the cell is about), and what the law says of it."""

    name: str
    hits: int
    n: int
    law: float


def cells(case: Case, out: Outcomes) -> Iterator[Cell]:
    """Every cell of a case. Laws in FP64 from the very rows that the verifiers got."""
    p, q = case.p.astype(np.float64), case.q.astype(np.float64)
    p /= p.sum(axis=1, keepdims=True)
    keeps = np.minimum(p[:DEPTH], q).sum(axis=1)
    residual = np.maximum(p[:DEPTH] - q, 0)
    everything = len(out.kept)
    laws = (1 - keeps[0], keeps[0] * (1 - keeps[1]), keeps[0] * keeps[1])
    for count, law in enumerate(laws):
        yield Cell(f"{count} kept", int((out.kept == count).sum()), everything, float(law))
    for position in range(DEPTH + 1):
        reached = out.tokens[out.kept >= position, position]
        yield from _tokens(f"token {position}", reached, p[position])
        if position < DEPTH and residual[position].sum() > 1e-6:
            corrected = out.tokens[out.kept == position, position]
            yield from _tokens(f"correction {position}", corrected, residual[position] / residual[position].sum())


def _tokens(name: str, drawn: NDArray[np.int64], law: NDArray[np.float64]) -> Iterator[Cell]:
    counts = np.bincount(drawn, minlength=len(law))
    likely = np.flatnonzero(law >= LIKELY)
    for token in likely.tolist():
        yield Cell(f"{name} is {token}", int(counts[token]), len(drawn), float(law[token]))
    rest = np.setdiff1d(np.arange(len(law)), likely)
    yield Cell(f"{name} is unlikely", int(counts[rest].sum()), len(drawn), float(law[rest].sum()))


@dataclass
class Line:
    """How one verifier, or two, did in one case: the comparison that is nearest to its bound (`used` 1 is at it)."""

    case: str
    who: str
    draws: int
    kept: float
    law_kept: float
    worst: str
    off: float
    used: float


def judge(made: dict[str, dict[str, tuple[Case, Outcomes]]]) -> list[Line]:
    """Every cell of every verifier against its law, and against the same cell of the others; `made` by case and verifier."""
    tables = {
        name: {who: list(cells(case, out)) for who, (case, out) in by_verifier.items()} for name, by_verifier in made.items()
    }
    comparisons = sum(
        len(table) * (1 + (len(by_verifier) - 1) / 2) for by_verifier in tables.values() for table in by_verifier.values()
    )
    reach = math.log(2 * comparisons / FALSE_FAILURES) / 2
    lines = []
    for name, by_verifier in tables.items():
        whos = list(by_verifier)
        for who in whos:
            out = made[name][who][1]
            worst = max(((_used(cell.hits, cell.n, cell.law, math.inf, reach), cell) for cell in by_verifier[who]), key=_first)
            law_kept = sum(count * cell.law for count, cell in enumerate(by_verifier[who][: DEPTH + 1]))
            off = worst[1].hits / max(1, worst[1].n) - worst[1].law
            lines.append(Line(name, who, len(out.kept), float(out.kept.mean()), law_kept, worst[1].name, off, worst[0]))
        for at, one in enumerate(whos):
            for other in whos[at + 1 :]:
                pairs = list(zip(by_verifier[one], by_verifier[other], strict=True))
                worst_pair = max(
                    ((_used(a.hits, a.n, b.hits / max(1, b.n), b.n, reach), a, b) for a, b in pairs), key=_first
                )
                used, a, b = worst_pair
                off = a.hits / max(1, a.n) - b.hits / max(1, b.n)
                kept = float(made[name][one][1].kept.mean() - made[name][other][1].kept.mean())
                lines.append(Line(name, f"{one} - {other}", 0, kept, 0.0, a.name, off, used))
    return lines


def _first(entry: tuple[Any, ...]) -> float:
    return float(entry[0])


def _used(hits: int, n: int, other: float, other_n: float, reach: float) -> float:
    """How much of its bound a difference uses."""
    if not n or not other_n:
        return 0.0
    return abs(hits / n - other) / math.sqrt(reach * (1 / n + 1 / other_n))


def run(names: list[str], scale: float, seed: int) -> list[Line]:
    """All cases by all verifiers `names`, each with drafts of its own."""
    made: dict[str, dict[str, tuple[Case, Outcomes]]] = {}
    stage = StageLine(wanted=True)
    every = cases()
    for number, case in enumerate(every):
        for index, name in enumerate(names):
            stage(f"{case.name}: {name}", number * len(names) + index, len(every) * len(names))
            share = WIDE_SHARE if case.vocabulary > 1000 else 1
            draws = max(1, int(DRAWS[name] * scale / share))
            drafts = draft(case, draws, seed * 100 + index)
            made.setdefault(case.name, {})[name] = (case, VERIFIERS[name](case, drafts, seed * 100 + index))
    stage.clear()
    return judge(made)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", choices=NAMES, action="append", help="this verifier (may be repeated); all by default")
    parser.add_argument("--scale", type=float, default=1.0, help="draws, as a multiple of the usual")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    names = given.only or list(NAMES)
    lines = run(names, given.scale, given.seed)
    loses = vllm_loses_temperatures() if "vllm" in names else None
    if given.json:
        print(json.dumps({"lines": [line.__dict__ for line in lines], "vllm_loses_temperatures": loses}))
    else:
        print(f"{'case':<18}{'verifier':<22}{'draws':>8}{'kept':>9}{'law':>8}  {'off':>9}{'of bound':>9}  worst cell")
        for line in lines:
            law = f"{line.law_kept:8.4f}" if line.draws else " " * 8
            draws = f"{line.draws:8}" if line.draws else " " * 8
            head = f"{line.case:<18}{line.who:<22}{draws}{line.kept:9.4f}{law}"
            print(f"{head}  {line.off:+9.5f}{line.used:9.2f}  {line.worst}")
        if loses is not None:
            print(f"vLLM's expand_batch_to_tokens on a CPU loses its result: {'yes' if loses else 'no'}")
    beyond = [line for line in lines if line.used > 1]
    if beyond:
        sys.exit("beyond the bound: " + "; ".join(f"{line.case}, {line.who}: {line.worst}" for line in beyond))


if __name__ == "__main__":
    main()
