"""Streams of frames for the fuzzer: bytes from anywhere, put into a session that stands where a golden vector leaves it.

Between `fuzz_targets` and the benches of `tests/protocol/golden.py`. An input is a byte for the scene, one of switches, then the
stream. Nothing but digests keeps random bytes out, so the switches renew them: without that no check behind them would be met.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator

import numpy as np
from protocol import golden

from pp1q_transport import rng, wire
from pp1q_transport._native.kernels import xxh3_64
from pp1q_transport.errors import Reason
from pp1q_transport.session import slots as st

SIGN_HEADERS, SIGN_PAYLOADS, IDENTIFY, LATE = 1, 2, 4, 8
SIGNED = SIGN_HEADERS | SIGN_PAYLOADS | IDENTIFY
CHUNKS = (1 << 30, 1, 127, 1000)  # by bits 4 and 5: how much comes in one receive
FRAMES_MOST = 48
LATE_NS = 3_600_000_000_000  # beyond every budget of the golden STEPs

Scene = tuple[str, str, tuple[str, ...]]


@functools.cache
def scenes(parties: tuple[str, ...]) -> tuple[Scene, ...]:
    """Every state that a golden vector of these parties names, in a fixed order; the full-size session is left out."""
    found = {
        (vector.note["to"], vector.note["session"], tuple(vector.note["before"]))
        for vector in golden.vectors().values()
        if vector.note["plane"] != "control" and vector.note["to"] in parties and vector.note["session"] != "full"
    }
    return tuple(sorted(found))


def seeds(parties: tuple[str, ...]) -> Iterator[bytes]:
    """Every golden vector of these parties as an input: as it is, and signed again."""
    for vector in golden.vectors().values():
        scene = (vector.note["to"], vector.note["session"], tuple(vector.note.get("before", ())))
        if vector.note["plane"] == "control" or scene not in scenes(parties):
            continue
        where = scenes(parties).index(scene)
        for switches in (0, SIGNED):
            yield bytes((where, switches)) + vector.data


def _bench(scene: Scene) -> golden.Bench:
    vector = golden.Golden({"to": scene[0], "session": scene[1], "before": list(scene[2])}, b"", b"")
    return golden.bench_for(vector)


def frames(stream: bytes, switches: int, bench: golden.Bench) -> Iterator[bytes]:
    """The stream cut where its headers say, each frame signed as the switches ask."""
    at = 0
    for _ in range(FRAMES_MOST):
        if at >= len(stream):
            return
        head = bytearray(stream[at : at + wire.HEADER_BYTES])
        at += len(head)
        if len(head) < wire.HEADER_BYTES:
            yield bytes(head)
            return
        length = struct.unpack_from("<I", head, 56)[0]
        payload = stream[at : at + length]
        at += len(payload)
        yield _signed(head, payload, switches, bench) + payload
    yield stream[at:]


def _signed(head: bytearray, payload: bytes, switches: int, bench: golden.Bench) -> bytes:
    if switches & IDENTIFY:
        nonce = bench.terms.receiver_nonce if bench.sends_receiver_frames is False else bench.terms.leader_nonce
        struct.pack_into("<QQ", head, 8, nonce, bench.terms.session)
    if switches & SIGN_HEADERS:
        struct.pack_into("<Q", head, 120, xxh3_64(head, 0, 120, 0))
    header = wire.Header()
    if switches & SIGN_PAYLOADS and payload and header.decode(head, 0) == 0:
        seed = header.payload_seed(bench.terms.leader_nonce)
        struct.pack_into("<Q", head, 112, xxh3_64(payload, 0, len(payload), seed))
        struct.pack_into("<Q", head, 120, xxh3_64(head, 0, 120, 0))
    return bytes(head)


def run(data: bytes, parties: tuple[str, ...]) -> None:
    """One input, to the end of its link. Raises `AssertionError` for what must never hold."""
    if len(data) < 2:
        return
    known = scenes(parties)
    bench = _bench(known[data[0] % len(known)])
    switches, stream = data[1], data[2:]
    if isinstance(bench, golden.ProofBench):
        outcome = bench.feed(stream)
        assert not outcome.refused or Reason(outcome.reason)
        return
    now, chunk = golden.START_NS, CHUNKS[switches >> 4 & 3]
    for frame in frames(stream, switches, bench):
        code = golden.fill(bench.assembler, frame, now, chunk)
        bench.fence()
        session = bench.session
        assert not code or Reason.from_code(code)
        if code or session.broken:
            break
        if switches & LATE and isinstance(bench, golden.ReceiverBench):
            now += LATE_NS
            bench.session.tick(now)
            bench.fence()
    if isinstance(bench, golden.ReceiverBench):
        _judge_ready(bench)
    _judge_sent(golden.drain(bench.session.outbox))
    trouble = bench.cut()
    assert not trouble, trouble


def _judge_sent(sent: bytes) -> None:
    """What an end says, whatever it heard, is frames."""
    at, header = 0, wire.Header()
    while at < len(sent):
        assert header.decode(sent, at) == 0
        at += wire.HEADER_BYTES + header.payload_length
    assert at == len(sent)


def _judge_ready(bench: golden.ReceiverBench) -> None:
    """Every proposal that is ready holds q that sums to one, and the tokens that the RNG draws from it."""
    geometry = bench.table.geometry
    for slot in bench.table.slots:
        if slot.state != st.READY:
            continue
        tokens = np.frombuffer(bench.memory, "<i4", slot.depth, slot.meta_at)
        request = bench.requests.requests[slot.request]
        for index, token in enumerate(tokens.tolist()):
            at = geometry.row_offset(slot.index, index)
            entries = int(np.frombuffer(bench.memory, "<u4", 1, slot.meta_at + 4 * (slot.depth + index))[0])
            q = np.frombuffer(bench.memory, "<f4", entries, at).astype(np.float64) * (1 << 24)
            ids = np.arange(entries)
            if slot.representation == wire.SPARSE:
                ids = np.frombuffer(bench.memory, "<i4", entries, at + 4 * entries)
            assert np.all((q >= 0) & (q == np.floor(q))), "a ready row that is no q"
            assert q.sum() == 1 << 24, "a ready row of another mass"
            assert np.all(np.diff(ids) > 0), "ready IDs out of order"
            drawn = rng.draw24(request.seed, rng.Domain.PROPOSAL, slot.request_generation, slot.round, slot.anchor + 1 + index)
            place = int(np.searchsorted(np.cumsum(q), drawn, side="right"))
            assert ids[place] == token, "a ready token that was not drawn from its row"
