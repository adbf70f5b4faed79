"""Every row of real next-token logits, at four temperatures, sparse and dense: q, draws, verdicts, shards against exact integers.

The file (a .npy of float32 [rows, vocabulary]) is named by PP1Q_REAL_LOGITS, or lies in ../shared/data beside the checkout; where
neither is and SmolLM2 is set up (scripts/setup-model.sh model), the model makes one. Without any that test is skipped, by that
name. The same checks always run on made-up rows of the same shape of distribution.
"""

from __future__ import annotations

import math
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pp1q_transport import dyadic, sharding
from pp1q_transport.dyadic import MASS
from pp1q_transport.sharding import Shard, Steps, emulate, shards_of
from pp1q_transport.verify import FastTarget, QRow, wide

ROOT = Path(__file__).parents[2]
VARIABLE = "PP1Q_REAL_LOGITS"
TEMPERATURES = (0.0, 0.6, 1.0, 1.5)
SUPPORTS = (16, 32, 64, 256, None)
END = 1 << 64
U24S = (0, 1, MASS // 3, MASS - 1)
LIMB = np.int64(24)
LOW = np.int64((1 << 24) - 1)


def real_file() -> Path:
    """Where real logits are; the test is skipped where there are none."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    beside = ROOT.parent / "shared" / "data" / "smollm2_logits_f32.npy"
    made = ROOT / ".cache" / "smollm2_logits_f32.npy"
    if beside.exists():
        return beside
    if not made.exists():
        if not (ROOT / ".venv-model" / ".ready").exists():
            pytest.skip(f"no real logits: name a file ({VARIABLE}), or run scripts/setup-model.sh model")
        python = ROOT / ".venv-model" / "bin" / "python"
        subprocess.run([str(python), str(ROOT / "examples" / "smollm2" / "rows.py"), str(made)], check=True, timeout=600)
    return made


def real_rows() -> NDArray[np.float32]:
    rows = np.load(real_file())
    assert rows.ndim == 2
    assert rows.dtype == np.float32
    assert len(rows) >= 32
    return rows


def made_up_rows() -> NDArray[np.float32]:
    """A head of a few likely tokens and a long tail of unlikely ones; ties and masked tokens among them."""
    noise = np.random.default_rng(4)
    rows = noise.normal(size=(2, 6001)) * 2.5 - 4
    rows[:, noise.integers(0, 6001, 40)] += noise.exponential(6, 40)
    rows[1, 100:200] = -np.inf
    rows[1, 300:340] = rows[1].max()
    return rows.astype(np.float32)


class Residual:
    """max(p - q, 0) exactly, in two int64 limbs of numpy: independent of the kernels, and fast enough for whole vocabularies."""

    def __init__(self, weights: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        total = int(weights.sum())
        whole = weights - counts * np.int64(total >> 24)
        part = counts * np.int64(total & int(LOW))
        positive = (whole > (part >> LIMB)) & ((whole > 0) | (part > 0))
        self.whole = np.cumsum(np.where(positive, whole, 0))
        self.part = np.cumsum(np.where(positive, part, 0))
        self.mass = self.up_to(len(weights) - 1)

    def up_to(self, index: int) -> int:
        return (int(self.whole[index]) << 24) - int(self.part[index]) if index >= 0 else 0

    def pick(self, u64: int) -> int:
        threshold = (u64 * self.mass) >> 64
        low, high = 0, len(self.whole) - 1
        while low < high:
            middle = (low + high) // 2
            if self.up_to(middle) > threshold:
                high = middle
            else:
                low = middle + 1
        return low

    def edges(self, index: int) -> set[int]:
        """The first and last noise that pick an index, and their neighbours."""
        first = -(-(self.up_to(index - 1) << 64) // self.mass)
        end = -(-(self.up_to(index) << 64) // self.mass)
        return {u64 for u64 in (first - 1, first, end - 1, end) if 0 <= u64 < END}


@dataclass
class Setting:
    """One target row in both forms, and one q drawn from the same logits at a temperature."""

    weights: NDArray[np.float32]
    target: FastTarget
    integers: NDArray[np.int64]
    q: QRow
    counts: NDArray[np.int64]


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """FP32 probabilities as an engine makes them."""
    shifted = np.exp(logits - logits.max())
    return (shifted / shifted.sum(dtype=np.float32)).astype(np.float32)


def settings_of(logits: NDArray[np.float32], others: NDArray[np.float32]) -> list[Setting]:
    """p from `others` (a neighbouring position for a real model: near q in shape, far in place), q from `logits`."""
    weights = softmax(others)
    target = FastTarget(weights)
    integers = np.array(target.integers(), np.int64)
    made = []
    for temperature in TEMPERATURES:
        draft = dyadic.weights_from_logits(logits, temperature)
        for k in SUPPORTS:
            counts = np.zeros(len(logits), np.int64)
            if k is None:
                counts[:] = dyadic.allocate(draft)
                q = QRow(dyadic.to_q(counts))
            else:
                ids, few = dyadic.allocate_top_k(draft, k)
                counts[ids] = few
                q = QRow(dyadic.to_q(few), ids)
            made.append(Setting(weights, target, integers, q, counts))
    return made


def check_q(s: Setting) -> list[int]:
    """q is a q, and its draws are where its cumulative counts say; returns the tokens drawn."""
    assert int(s.counts.sum()) == MASS
    cumulative = np.cumsum(s.counts)
    tokens = []
    for u24 in U24S:
        token = int(np.searchsorted(cumulative, u24, side="right"))
        if s.q.ids is None:
            assert dyadic.draw(s.counts, u24) == token
            dyadic.validate_dense(s.q.values, len(s.counts), token)
        else:
            assert dyadic.draw_sparse(s.q.ids, s.q.counts(), u24) == token
            dyadic.validate_sparse(s.q.ids, s.q.values, len(s.counts), token)
        tokens.append(token)
    return tokens


def check_verdicts(s: Setting, tokens: list[int]) -> None:
    """Acceptance at its threshold +-1, and corrections at the ends of their intervals, as exact integers say."""
    total = int(s.integers.sum())
    assert s.target.total == total
    for token in set(tokens):
        kept = wide.acceptance_threshold(int(s.counts[token]), int(s.integers[token]), total)
        for u64 in {0, kept - 1, kept, kept + 1, END - 1}:
            if 0 <= u64 < END:
                assert s.target.accept(token, s.q, u64) == (u64 < kept)
    residual = Residual(s.integers, s.counts)
    assert s.target.residual_mass(s.q) == residual.mass
    if residual.mass == 0:
        return
    for start in (0, END // 7, END // 2, END - 1):
        index = residual.pick(start)
        for u64 in residual.edges(index):
            assert s.target.correct(s.q, u64) == (residual.pick(u64), True)
            assert s.integers[residual.pick(u64)] > 0


def check_shards(s: Setting, shards: tuple[Shard, ...], token: int) -> None:
    """The verdicts of four shards: on a token drawn from q, at its threshold +-1, and the correction."""
    targets = on_all([sharding.target_sharded(shard, s.weights[shard.first_id : shard.end_id].copy()) for shard in shards])
    assert {target.total for target in targets} == {s.target.total}
    rows = []
    for shard in shards:
        if s.q.ids is None:
            rows.append(QRow(s.q.values[shard.first_id : shard.end_id].copy()))
        else:
            inside = (s.q.ids >= shard.first_id) & (s.q.ids < shard.end_id)
            rows.append(QRow(s.q.values[inside], s.q.ids[inside]))
    kept = wide.acceptance_threshold(int(s.counts[token]), int(s.integers[token]), s.target.total)
    for u64 in {kept - 1, kept, kept + 1}:
        if 0 <= u64 < END:
            noise = (u64, *[None] * (len(shards) - 1))
            verdicts = [sharding.accept_sharded(t, token, q, u) for t, q, u in zip(targets, rows, noise, strict=True)]
            assert on_all(verdicts) == [u64 < kept] * len(shards)
    if s.target.residual_mass(s.q):
        u64 = END // 3
        noise = (u64, *[None] * (len(shards) - 1))
        corrected = on_all([sharding.correct_sharded(t, q, u) for t, q, u in zip(targets, rows, noise, strict=True)])
        assert corrected == [s.target.correct(s.q, u64)] * len(shards)


def on_all(ranks: list[Steps]) -> list:  # type: ignore[type-arg]
    return emulate(ranks)


def check_sharded_q(logits: NDArray[np.float32], shards: tuple[Shard, ...]) -> None:
    """Counts and draws of shards, from logits on, at every temperature and support."""
    for temperature in TEMPERATURES:
        draft = dyadic.weights_from_logits(logits, temperature)
        parts = on_all([sharding.weights_sharded(s, logits[s.first_id : s.end_id], temperature) for s in shards])
        assert np.concatenate(parts).tobytes() == draft.tobytes()
        for k in SUPPORTS:
            if k is None:
                built = on_all([sharding.allocate_sharded(s, part) for s, part in zip(shards, parts, strict=True)])
                counts = dyadic.allocate(draft)
                assert np.concatenate([row.counts for row in built]).tobytes() == counts.tobytes()
                drawn = on_all([sharding.draw_sharded(row, MASS // 2) for row in built])
                assert drawn == [dyadic.draw(counts, MASS // 2)] * len(shards)
                continue
            built = on_all([sharding.allocate_top_k_sharded(s, part, k) for s, part in zip(shards, parts, strict=True)])
            ids, counts = dyadic.allocate_top_k(draft, k)
            assert np.concatenate([row.ids for row in built]).tolist() == ids.tolist()
            assert np.concatenate([row.counts for row in built]).tolist() == counts.tolist()
            drawn = on_all([sharding.draw_sharded(row, MASS // 2) for row in built])
            assert drawn == [dyadic.draw_sparse(ids, counts, MASS // 2)] * len(shards)


def check_rounding(weights: NDArray[np.float32], target: FastTarget, integers: NDArray[np.int64]) -> float:
    """How far rounding to integers moves p, in total variation (80-bit arithmetic); within its bound."""
    exact = weights.astype(np.longdouble)
    rounded = integers.astype(np.longdouble)
    off = float(abs(rounded / rounded.sum() - exact / exact.sum()).sum() / 2)
    assert off <= len(weights) / 2 * 2.0**-50
    return off


def check_rows(rows: NDArray[np.float32]) -> list[float]:
    size = rows.shape[1]
    shards = shards_of([size // 32 * rank // 4 * 32 for rank in range(4)] + [size])
    moved = []
    for index in range(len(rows)):
        everything = settings_of(rows[index], rows[(index + 1) % len(rows)])
        moved.append(check_rounding(everything[0].weights, everything[0].target, everything[0].integers))
        for setting in everything:
            tokens = check_q(setting)
            check_verdicts(setting, tokens)
            check_shards(setting, shards, tokens[1])
        check_sharded_q(rows[index], shards)
    return moved


def test_made_up_rows() -> None:
    assert len(check_rows(made_up_rows())) == 2


@pytest.mark.timeout(900)
def test_every_real_row() -> None:
    rows = real_rows()
    moved = check_rows(rows)
    print(f"TV(p', p) over {rows.shape[0]} rows: largest {max(moved):.3g}, mean {math.fsum(moved) / len(moved):.3g}")
    assert max(moved) < 1e-11
