"""The fuzzers' seeds, and a plain mutator of them with a fixed seed: what runs where neither atheris nor libFuzzer is."""

from __future__ import annotations

import io
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import fuzz_run
import fuzz_streams
import fuzz_targets
from fuzz_targets import TARGETS, Target

from pp1q_transport.capture.pcapng import CaptureError
from pp1q_transport.capture.reading import Recording
from pp1q_transport.capture.replay import Replay
from pp1q_transport.errors import PeerFault, Reason

MUTATIONS = 400


def mutated(data: bytes, others: list[bytes], noise: random.Random) -> bytes:
    """One to four small changes, of the kinds that libFuzzer makes."""
    work = bytearray(data)
    for _ in range(noise.randrange(1, 5)):
        at = noise.randrange(len(work) + 1)
        kind = noise.randrange(6)
        if kind == 0 and at < len(work):
            work[at] ^= 1 << noise.randrange(8)
        elif kind == 1 and at < len(work):
            work[at] = noise.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif kind == 2:
            del work[at : at + noise.choice((1, 4, 64))]
        elif kind == 3:
            work[at:at] = noise.randbytes(noise.choice((1, 4, 16)))
        elif kind == 4:
            other = noise.choice(others)
            work[at:at] = other[noise.randrange(len(other) + 1) :]
        else:
            work[at : at + 8] = noise.choice((0, 1, (1 << 32) - 1, 1 << 63, (1 << 64) - 1)).to_bytes(8, "little")
    return bytes(work[:8192])


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_their_mutants_raise_named_errors_alone(name: str) -> None:
    noise = random.Random(7)
    seeds = list(fuzz_targets.corpus(name))
    assert seeds
    for data in [b"", b"\0", *seeds]:
        fuzz_targets.play(TARGETS[name], data)
    for _ in range(MUTATIONS):
        data = mutated(noise.choice(seeds), seeds, noise)
        try:
            fuzz_targets.play(TARGETS[name], data)
        except Exception as fault:
            fault.add_note(f"input: {data.hex()}")
            raise


def test_seeds_reach_behind_the_digests() -> None:
    """A fuzzer whose every seed is refused at the door tests the door."""
    assert len(fuzz_streams.scenes(fuzz_targets.RECEIVER_SIDE)) > 10
    assert len(fuzz_streams.scenes(fuzz_targets.LEADER_SIDE)) > 10
    assert len(fuzz_streams.scenes(fuzz_targets.RANKS)) > 15
    passed = 0
    for data in fuzz_targets.payloads():
        try:
            fuzz_targets.payload(data)
            passed += 1
        except TARGETS["payload"].named:
            continue
    assert passed >= 8
    for data in fuzz_targets.captures():
        file = fuzz_targets._file(data[1:]) if data[0] == 1 else data
        assert Replay().run(Recording(io.BytesIO(file))).ready == 1


def test_group_seeds_reach_decisions() -> None:
    """Of members and of rank 0: epochs open, and proposals become ready at members."""
    seen: dict[str, int] = {}
    ready = 0
    for data in fuzz_targets.group_captures():
        try:
            outcome = Replay().run(Recording(io.BytesIO(fuzz_targets._file(data[1:]))))
        except CaptureError as error:
            seen[str(error)[:40]] = seen.get(str(error)[:40], 0) + 1
            continue
        ready += outcome.ready
        seen["replayed"] = seen.get("replayed", 0) + 1
    assert seen["replayed"] > 60, seen
    assert ready >= 2


def test_a_stream_signed_again_is_as_good_as_the_first() -> None:
    """The switches repair what they say: a broken header digest no more, and the row behind it lands."""
    vector = fuzz_streams.golden.vectors()["reply_dense_0"]
    bench = fuzz_streams.golden.bench_for(vector)
    bent = bytearray(vector.data)
    bent[120] ^= 1
    bent[112] ^= 1
    assert list(fuzz_streams.frames(bytes(bent), fuzz_streams.SIGNED, bench)) == [vector.data]
    assert list(fuzz_streams.frames(bytes(bent), 0, bench)) == [bytes(bent)]


def test_any_other_error_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def one(data: bytes) -> None:
        if data == b"named":
            raise PeerFault(Reason.MALFORMED)
        if data == b"found":
            raise KeyError("slot")

    monkeypatch.setitem(TARGETS, "planted", Target(one, lambda: iter(()), (PeerFault,)))
    for text in (b"fine", b"named"):
        (tmp_path / text.decode()).write_bytes(text)
    assert fuzz_run.play("planted", [tmp_path]) == 0
    (tmp_path / "found").write_bytes(b"found")
    assert fuzz_run.play("planted", [tmp_path]) == 1
    assert "found: KeyError: 'slot'" in capsys.readouterr().out


def test_kernel_seeds_name_every_kernel() -> None:
    assert {data[0] for data in fuzz_targets.kernels()} == set(range(8))
