"""What a capture holds and does not hold, where it lies, and that neither it nor its disk gets in the way of a session."""

from __future__ import annotations

import io
import os
import stat
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from capture_rig import FAULTS, demo, recorded, replayed, run_live

from pp1q_transport import wire
from pp1q_transport.capture import pcapng, recorder, records
from pp1q_transport.capture.pcapng import CaptureError
from pp1q_transport.capture.recorder import FILE_BYTES_LEAST, Capture
from pp1q_transport.client import configure, open_leader
from pp1q_transport.client.opening import open_receiver
from pp1q_transport.errors import ConfigError
from pp1q_transport.links.faulty import FaultRates
from pp1q_transport.session.negotiate import Role
from pp1q_transport.toy.demo import DemoOptions, DemoTarget, open_target, run_draft
from pp1q_transport.wire import Header

pytestmark = pytest.mark.timeout(120)
SMALL: dict[str, Any] = {"rounds": 40, "vocab_size": 256, "support": 8}


def test_both_directions_are_there_as_the_sessions_had_them() -> None:
    live = demo()
    kinds: dict[tuple[bool, str], int] = {}
    header = Header()
    taken = recorded(live.files[0])
    for record in taken:
        if record.what == records.FRAME:
            assert header.decode(record.data, 0) == 0
            assert len(record.data) == wire.HEADER_BYTES + header.payload_length
            key = (record.incoming, wire.KIND_NAMES[header.kind])
            kinds[key] = kinds.get(key, 0) + 1
    assert kinds == {
        (False, "OPEN"): 4,
        (False, "STEP"): 60,
        (False, "COMMIT"): 60,
        (False, "CLOSE"): 4,
        (True, "REPLY"): 300,
        (True, "COMPLETION"): 60,
    }
    assert [record.what for record in taken if record.what != records.FRAME] == [records.STATE, records.END]
    state = records.parse_json(taken[0].data)
    assert taken[0].what == records.STATE
    assert {"session", "ours", "theirs", "slots", "requests"} <= set(state)
    assert state["ours"]["boot_nonce"] != state["theirs"]["boot_nonce"]  # type: ignore[index]
    times = [record.time_ns for record in taken]
    assert times == sorted(times)


def test_only_its_owner_may_read_it_whatever_was_there(tmp_path: Path) -> None:
    path = tmp_path / "x.pcapng"
    path.write_bytes(b"old" * 1000)
    path.chmod(0o644)
    Capture(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert b"old" not in path.read_bytes()


@pytest.mark.parametrize("how", ("folder", "missing", "link", "fifo"))
def test_a_place_that_can_not_be_written_is_named(tmp_path: Path, how: str) -> None:
    path = tmp_path / "x.pcapng"
    other = tmp_path / "other"
    if how == "folder":
        path.mkdir()
    elif how == "missing":
        path = tmp_path / "no" / "x.pcapng"
    elif how == "link":
        other.write_bytes(b"kept")
        path.symlink_to(other)
    else:
        os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"x\.pcapng"):
        Capture(path)
    assert not other.exists() or other.read_bytes() == b"kept"


def test_sizes_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        Capture(tmp_path / "x", file_bytes=FILE_BYTES_LEAST - 1)
    with pytest.raises(ConfigError):
        Capture(tmp_path / "x", files=0)


def test_files_rotate_and_each_one_replays_by_itself(tmp_path: Path) -> None:
    options = DemoOptions(seed=5, rounds=330, vocab_size=256, support=64, faults=FaultRates(corrupt=0.05, drop=0.05))
    live = run_live(tmp_path, options, file_bytes=FILE_BYTES_LEAST)
    assert len(live.files) >= 2
    assert all(len(file) < FILE_BYTES_LEAST + (64 << 10) for file in live.files)
    outcomes = [replayed(file) for file in live.files]
    assert all(outcome.differs == [] and not outcome.torn for outcome in outcomes)
    assert sum(outcome.ready for outcome in outcomes) == live.ready
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in tmp_path.iterdir())
    for reason, count in live.reasons.items():
        assert sum(outcome.reasons.get(reason, 0) for outcome in outcomes) == count


def test_no_more_files_than_asked_for(tmp_path: Path) -> None:
    options = DemoOptions(seed=5, rounds=60, vocab_size=4096)
    run_live(tmp_path, options, file_bytes=FILE_BYTES_LEAST, files=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo.pcapng", "demo.pcapng.1"]


def test_no_secret_is_in_it(tmp_path: Path) -> None:
    live = run_live(tmp_path, DemoOptions(**SMALL))
    (secret,) = live.secrets
    for form in (secret, secret.hex().encode()):
        assert form not in live.files[0]


def test_redacted_holds_neither_tokens_nor_q_nor_what_tells_them(tmp_path: Path) -> None:
    plain, redacted = tmp_path / "plain", tmp_path / "redacted"
    plain.mkdir()
    redacted.mkdir()
    options = DemoOptions(**SMALL, seed=8)
    told = run_live(plain, options)
    kept = run_live(redacted, options, redact=True)
    assert told.tokens == kept.tokens
    hidden = redacted_words(told.files[0])
    data = kept.files[0]
    assert all(word in told.files[0] and word not in data for word in hidden)
    for seed in kept.seeds:
        assert struct.pack("<Q", seed) not in data
        assert str(seed).encode() not in data
    reader = pcapng.Reader(io.BytesIO(data))
    headers = 0
    header = Header()
    for packet in reader:
        piece = records.parse(packet.data)
        if piece.what == records.FRAME:
            assert len(piece.data) == wire.HEADER_BYTES
            assert header.decode(piece.data, 0) == 0
            assert (header.payload_digest, piece.flags & records.REDACTED) == (0, records.REDACTED)
            headers += 1
    assert headers == 40 * 8 + 8
    assert "redacted" in reader.comment
    with pytest.raises(CaptureError, match="redacted"):
        replayed(data)


def redacted_words(data: bytes) -> set[bytes]:
    """Payloads, digests over them and prefix digests: the same in both runs but for session and boot nonces."""
    header = Header()
    words = set()
    for record in recorded(data):
        if record.what == records.FRAME and header.decode(record.data, 0) == 0:
            if header.kind in (wire.OPEN, wire.REPLY) and header.payload_length >= 16:
                words.add(record.data[wire.HEADER_BYTES :])
            if header.kind == wire.STEP:
                words.add(record.data[64:80])
    assert len(words) > 40
    return words


def test_a_full_disk_ends_the_capture_and_nothing_else(tmp_path: Path) -> None:
    options = DemoOptions(**SMALL)
    capture = Capture(tmp_path / "x.pcapng")
    with open_target(options, capture=capture) as receiver:
        drafting = threading.Thread(target=run_draft, args=(options, receiver.endpoint), daemon=True)
        drafting.start()
        receiver.wait_for_peer()
        capture._file = FullDisk()  # type: ignore[assignment]
        assert DemoTarget(options, receiver).run().ready == options.rounds
    drafting.join(20)
    capture.close()
    assert capture.failed == "No space left on device"
    assert capture.dropped > 0


class FullDisk:
    def write(self, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    def flush(self) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""


def test_what_the_disk_was_too_slow_for_is_said_and_makes_a_replay_refuse(tmp_path: Path, monkeypatch: Any) -> None:
    capture = Capture(tmp_path / "x.pcapng")
    options = DemoOptions(**SMALL)
    with open_target(options, capture=capture) as receiver:
        drafting = threading.Thread(target=run_draft, args=(options, receiver.endpoint), daemon=True)
        drafting.start()
        receiver.wait_for_peer()
        monkeypatch.setattr(recorder, "QUEUE_BYTES", -1)
        step = receiver.enqueue(receiver.open_request(99, [1]), support=8)
        monkeypatch.undo()
        step.wait().release()
        DemoTarget(options, receiver).run()
    drafting.join(20)
    capture.close()
    assert capture.dropped > 0
    with pytest.raises(CaptureError, match="packets are missing"):
        replayed((tmp_path / "x.pcapng").read_bytes())


def test_without_a_capture_none_of_it_is_loaded() -> None:
    code = (
        "import sys, pp1q_transport.client, pp1q_transport.engine, pp1q_transport.daemon.service\n"
        "sys.exit(any(name.startswith('pp1q_transport.capture') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_a_leaders_capture_replays_as_well(tmp_path: Path) -> None:
    capture = Capture(tmp_path / "leader.pcapng")
    with (
        open_receiver(configure(Role.RECEIVER, listen="tcp://127.0.0.1:0", vocab_size=128)) as receiver,
        open_leader(connect=receiver.endpoint, vocab_size=128, capture=capture) as leader,
    ):
        stop = threading.Event()

        def draft() -> None:
            while not stop.is_set():
                step = leader.next_step()
                if step is not None:
                    for position in step.positions:
                        step.put(position, weights=np.ones(128))

        drafting = threading.Thread(target=draft, daemon=True)
        drafting.start()
        receiver.wait_for_peer()
        request = receiver.open_request(1, [1, 2])
        for _round in range(5):
            with receiver.step(request, support=8) as proposal:
                proposal.commit(1, [int(proposal.tokens[0])])
        stop.set()
        drafting.join(10)
    capture.close()
    outcome = replayed((tmp_path / "leader.pcapng").read_bytes())
    assert (outcome.ready, outcome.frames, outcome.differs, outcome.compared) == (5, 30, [], 0)


@pytest.mark.parametrize("support", (None, 8))
def test_faults_are_in_it_and_count_as_they_did(support: int | None) -> None:
    live = demo(support=support, faults=FAULTS, rounds=200)
    outcome = replayed(live.files[0])
    assert outcome.differs == []
    assert outcome.reasons == live.reasons
    assert outcome.discards == live.discards
    assert outcome.ready == live.ready
    assert outcome.compared == outcome.sessions > 1
    assert {"payload_digest", "header_digest", "generation_stale", "link_error"} <= set(outcome.reasons)
