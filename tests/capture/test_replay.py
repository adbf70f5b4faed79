"""Replay: what a live run counted is counted again, corrupted frames do not pass, and a judge that sleeps is noticed."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from capture_rig import FAULTS, demo, recorded, replayed

from pp1q_transport import rng
from pp1q_transport.capture import byspec, records, trial
from pp1q_transport.capture.link_replay import Feed
from pp1q_transport.capture.mutation import KINDS, Mutator
from pp1q_transport.capture.oracle import Oracle
from pp1q_transport.capture.pcapng import CaptureError, Reader, packet
from pp1q_transport.capture.reading import Recording
from pp1q_transport.capture.replay import Replay
from pp1q_transport.capture.situations import SessionOf, situations
from pp1q_transport.capture.trial import Tally, Trials
from pp1q_transport.errors import Reason
from pp1q_transport.wire import Header

pytestmark = pytest.mark.timeout(120)


def pp1q(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pp1q_transport.cli", *words], capture_output=True, text=True, timeout=100, check=False
    )


@pytest.fixture(scope="module")
def sparse() -> list[SessionOf]:
    return situations(Recording(io.BytesIO(demo(faults=FAULTS, rounds=200).files[0])))


@pytest.fixture(scope="module")
def dense() -> list[SessionOf]:
    return situations(Recording(io.BytesIO(demo(support=None, rounds=60).files[0])))


# -- as it was ---------------------------------------------------------------------------------------------------------


def test_the_command_and_its_json(tmp_path: Path) -> None:
    """The main job of it, as a user does it: two processes, faults in flight, then the capture."""
    path = str(tmp_path / "x.pcapng")
    live = pp1q("demo", "--json", "--sparse", "8", "--vocab", "256", "--rounds", "120", "--faults", FAULTS, "--capture", path)
    told = json.loads(live.stdout)
    done = pp1q("replay", path, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert {"frames", "accepted", "refused", "reasons", "mutated", "undetected"} <= set(said)
    assert (said["ready"], said["discarded"], said["mutated"], said["undetected"]) == (told["ready"], told["discarded"], 0, 0)
    assert {reason: said["discards"].get(reason) for reason in told["reasons"]} == told["reasons"]
    assert said["refused"] == sum(said["reasons"].values()) > 0
    assert said["frames"] > said["accepted"] > 0
    report = pp1q("replay", path)
    assert report.returncode == 0
    assert report.stdout.endswith("the same as live\n")
    assert f"{told['ready']} ready, {told['discarded']} discarded" in report.stdout


def test_a_live_run_that_counted_something_else_is_told_and_costs_the_exit_status(tmp_path: Path) -> None:
    """A capture whose frames do not bring about what it says was counted."""
    data = demo(faults=FAULTS, rounds=200).files[0]
    taken = recorded(data)
    victim = next(at for at, record in enumerate(taken) if record.incoming and record.what == records.FRAME and at > 40)
    outcome = Replay().run(taken[:victim] + taken[victim + 1 :])
    assert outcome.differs
    path = tmp_path / "x.pcapng"
    path.write_bytes(without_packet(data, victim))
    done = pp1q("replay", str(path))
    assert done.returncode == 1
    assert "differs: " in done.stdout


def without_packet(data: bytes, number: int) -> bytes:
    """The file without its packet of that number."""
    kept, at, seen = b"", 0, 0
    while at < len(data):
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        is_packet = data[at] == 6
        if not (is_packet and seen == number):
            kept += data[at : at + size]
        seen += is_packet
        at += size
    return kept


def test_a_refusal_that_the_replay_does_not_share_is_a_difference() -> None:
    """A RESET of the live receiver for a fault that the captured frames do not show."""
    taken = recorded(demo().files[0])
    at = next(index for index, record in enumerate(taken) if record.incoming and record.data[5] == byspec.REPLY)
    reply = Header()
    reply.decode(taken[at].data, 0)
    reset = Header()
    reset.clear()
    reset.kind, reset.boot_nonce, reset.session = byspec.RESET, 7, reply.session
    reset.slot, reset.slot_generation, reset.request = reply.slot, reply.slot_generation, reply.request
    reset.subject, reset.status = 3, Reason.MASS.code
    frame = bytearray(128)
    reset.encode(frame, 0)
    outcome = Replay().run([*taken[: at + 1], taken[at]._replace(incoming=False, data=bytes(frame)), *taken[at + 1 :]])
    assert any("refused live as mass, not in the replay" in line for line in outcome.differs)


def test_budgets_run_on_the_captures_clock() -> None:
    """The same frames, the whole proposal later than its budget allows: timeout, whatever this host's clock says."""
    taken = recorded(demo().files[0])
    late = [r._replace(time_ns=r.time_ns + 10**10, began_ns=r.began_ns + 10**10) if r.incoming else r for r in taken]
    outcome = Replay().run(late)
    assert outcome.reasons["timeout"] == 60
    assert outcome.ready == 0


def test_a_torn_file_replays_as_far_as_it_goes(tmp_path: Path) -> None:
    data = demo().files[0]
    outcome = replayed(data[: len(data) // 2])
    assert outcome.torn
    assert 0 < outcome.ready < 60
    assert (outcome.sessions, outcome.compared) == (1, 0)
    path = tmp_path / "x.pcapng"
    path.write_bytes(data[: len(data) // 2])
    assert pp1q("replay", str(path)).stdout.endswith("the same as live in 0 of 1 sessions: the others can't be compared\n")
    assert outcome.differs == []


# -- files from anybody ------------------------------------------------------------------------------------------------


def test_a_damaged_file_is_a_named_error_and_nothing_else() -> None:
    data = demo(rounds=8).files[0]
    noise = random.Random(4)
    met = 0
    for _ in range(1500):
        damaged = bytearray(data)
        for _flip in range(noise.choice((1, 1, 4))):
            at = noise.randrange(len(damaged)) if noise.random() < 0.5 else noise.randrange(4000)
            damaged[at] = noise.randrange(256)
        try:
            replayed(bytes(damaged))
        except CaptureError:
            met += 1
    assert met > 100


@pytest.mark.parametrize("size", (0, 1, 11, 12, 60, 150, 2000))
def test_a_cut_file_is_named_or_torn(size: int) -> None:
    data = demo(rounds=8).files[0]
    try:
        assert replayed(data[:size]).torn or size in (60,)
    except CaptureError:
        assert size < 200


STATE_FAULTS: list[tuple[str, Any]] = [
    ("format", 2), ("redacted", True), ("session", -1), ("session", "x"), ("ours", None), ("theirs", {}), ("requests", 3),
    ("requests", [[1, 2]]), ("requests", [[1, 1 << 64, 0]]), ("slots", None), ("slots", [3]), ("slots", [{"index": 99}]),
    ("slots", [{"index": 0, "generation": 1}]), ("counted", None), ("counted", {"reasons": {"x": -1}}), ("account", "0"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), STATE_FAULTS)
def test_a_state_that_can_not_be_is_named(key: str, value: Any) -> None:
    taken = recorded(demo().files[0])
    state = records.parse_json(taken[0].data)
    state[key] = value
    with pytest.raises(CaptureError):
        Replay().run([taken[0]._replace(data=records.pack_json(state))])


@pytest.mark.parametrize("text", (b"", b"[1]", b"{", b"[" * 100_000, b'"x"', b"\xff"))
def test_what_is_no_json_object_is_named(text: bytes) -> None:
    with pytest.raises(CaptureError):
        records.parse_json(text)


def test_slots_beyond_memory_are_refused_before_they_are_made() -> None:
    taken = recorded(demo().files[0])
    state = records.parse_json(taken[0].data)
    for name in ("ours", "theirs"):
        hello = state[name]
        assert isinstance(hello, dict)
        hello |= {"max_slots": 4096, "depth": 32, "vocab_size": 1 << 24}
    with pytest.raises(CaptureError, match="a replay takes"):
        Replay().run([taken[0]._replace(data=records.pack_json(state))])


def test_packets_that_are_not_ours_are_named() -> None:
    data = demo().files[0]
    with pytest.raises(CaptureError, match="of link-layer type 1"):
        replayed(data.replace((147).to_bytes(2, "little") + bytes(2), (1).to_bytes(2, "little") + bytes(2), 1))
    with pytest.raises(CaptureError, match="no packet of a PP1Q capture"):
        replayed(data[:-4] + data[-4:] + packet(0, 1, 1, 0, b"\x09" * 40, 40))
    assert sum(1 for _ in Reader(io.BytesIO(data))) == len(recorded(data))


def test_a_file_that_is_not_there_and_options_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    done = pp1q("replay", str(tmp_path / "none"))
    assert (done.returncode, done.stderr.count("\n"), done.stdout) == (1, 1, "")
    assert "No such file" in done.stderr
    done = pp1q("replay", str(tmp_path / "none"), "--resign")
    assert (done.returncode, done.stderr) == (2, "pp1q: --resign is for mutated frames: give --mutate KIND as well\n")


# -- corrupted ---------------------------------------------------------------------------------------------------------


def tried(sessions: list[SessionOf], kind: str, count: int, resign: bool, seed: int = 1) -> Tally:
    trials = Trials(sessions, kind, seed, resign)
    trials.run(count)
    return trials.tally


@pytest.mark.parametrize("resign", (False, True), ids=("plain", "resigned"))
@pytest.mark.parametrize("kind", KINDS)
def test_no_mutation_of_any_kind_passes(sparse: list[SessionOf], dense: list[SessionOf], kind: str, resign: bool) -> None:
    for sessions in (sparse, dense):
        tally = tried(sessions, kind, 300, resign)
        assert (tally.mutated, tally.undetected, tally.examples) == (300, 0, [])
        assert tally.stricter == 0, "the oracle and the receiver read the contract alike, both ways"
        assert sum(tally.reasons.values()) > 30


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("resign", (False, True), ids=("plain", "resigned"))
def test_fifty_thousand_mutated_frames(sparse: list[SessionOf], dense: list[SessionOf], resign: bool) -> None:
    for sessions in (sparse, dense):
        tally = tried(sessions, "all", 12_500, resign, seed=20261201)
        assert (tally.mutated, tally.undetected, tally.stricter) == (12_500, 0, 0), tally.examples


# What signed mutations reach. A demo's nonces are fresh in each run, and the rarest of these takes thousands of trials.
BEHIND_THE_DIGESTS = {
    "unknown_flag", "reserved_bits", "boot_nonce", "session_mismatch", "slot_bounds", "slot_state", "generation_stale",
    "round_mismatch", "depth_mismatch", "position_bounds", "position_duplicate", "context_mismatch", "representation",
    "support_bounds", "id_range", "id_order", "nondyadic", "mass", "zero_q_token", "draw_mismatch", "request_mismatch",
    "length_bounds", "padding_nonzero", "negative", "incomplete", "reply_size", "nonfinite", "zero_entry", "id_duplicate",
}  # fmt: skip


@pytest.mark.timeout(300)
def test_signed_mutations_reach_the_checks_behind_the_digests(sparse: list[SessionOf], dense: list[SessionOf]) -> None:
    met: set[str] = set()
    for seed in range(100):  # all are met in the first few of these, nearly always
        for sessions in (sparse, dense):
            met |= set(tried(sessions, "all", 1000, True, seed).reasons)
        if met >= BEHIND_THE_DIGESTS:
            return
    assert met >= BEHIND_THE_DIGESTS


def test_the_same_seed_gives_the_same_trials(sparse: list[SessionOf]) -> None:
    first, second, other = (tried(sparse, "all", 300, True, seed) for seed in (5, 5, 6))
    assert first == second
    assert first.reasons != other.reasons


def test_the_command_mutates(tmp_path: Path) -> None:
    path = tmp_path / "x.pcapng"
    path.write_bytes(demo().files[0])
    done = pp1q("replay", str(path), "--mutate", "all", "--count", "500", "--resign", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["mutated"], said["undetected"], set(said["by_mutation"])) == (500, 0, set(KINDS))
    assert said["frames"] > 500
    assert "0 undetected" in pp1q("replay", str(path), "--mutate", "flip", "--count", "50").stdout


@pytest.mark.parametrize("kind", KINDS)
def test_a_mutation_is_one_and_the_signed_ones_carry_right_digests(dense: list[SessionOf], kind: str) -> None:
    session = dense[0]
    frames = session.whole[3].frames
    nonce = session.terms.leader_nonce
    for resign in (False, True):
        mutator = Mutator(random.Random(9), resign)
        for _ in range(60):
            done = mutator.mutate(kind, frames, session.whole[1].frames, nonce)
            assert done.frames != frames
            frame = done.frames[done.index]
            if resign and len(frame) >= byspec.HEADER:
                assert byspec.xxh(frame[:120]) == int.from_bytes(frame[120:128], "little")
                assert frames == session.whole[3].frames, "the original stays as it is"


# -- judges that sleep -------------------------------------------------------------------------------------------------


def test_a_receiver_that_takes_any_digest_is_caught(sparse: list[SessionOf], monkeypatch: Any) -> None:
    """As if the digests were not checked: every frame is signed anew on its way to the session, not to the oracle."""
    fed = Feed.put

    def signing(feed: Feed, data: Any, now_ns: int) -> int:
        at, stream = 0, bytearray(data)
        while at + byspec.HEADER <= len(stream):
            end = at + byspec.HEADER + int.from_bytes(stream[at + 56 : at + 60], "little")
            frame = stream[at:end]
            byspec.sign(frame, feed.session.terms.leader_nonce, payload=frame[5] == byspec.REPLY)
            stream[at:end] = frame
            at = end
        return fed(feed, bytes(stream), now_ns)

    monkeypatch.setattr(trial, "CHUNKED", 0.0)
    monkeypatch.setattr(Feed, "put", signing)
    tally = tried(sparse, "flip", 400, False)
    assert tally.undetected > 20
    assert tally.examples


def test_a_receiver_without_the_draw_proof_is_caught(sparse: list[SessionOf]) -> None:
    trials = Trials(sparse, "field", 3, True)
    for bench in trials._benches:
        bench.session.terms.draw_proof = False
    trials.run(4000)
    assert trials.tally.undetected > 0


def test_a_row_that_changes_after_it_was_checked_is_caught(sparse: list[SessionOf], monkeypatch: Any) -> None:
    """What a peer's late write does to memory it still reaches."""
    fed = Feed.put

    def writing(feed: Feed, data: Any, now_ns: int) -> int:
        code = fed(feed, data, now_ns)
        for slot in feed.session.table.slots:
            if slot.rows_done:
                feed.session.memory[slot.rows_at] ^= 1
        return code

    monkeypatch.setattr(Feed, "put", writing)
    assert tried(sparse, "reorder", 50, False).undetected > 10


def test_an_oracle_that_allows_less_is_seen_as_well(sparse: list[SessionOf], monkeypatch: Any) -> None:
    """Not a pass of something wrong by the transport: but a row ready that the oracle refuses is told as one."""
    monkeypatch.setattr(Oracle, "_complete", lambda *_arguments: False)
    assert tried(sparse, "duplicate", 50, False).undetected > 20


# -- the second reading of the format ----------------------------------------------------------------------------------


def test_the_oracles_noise_is_the_published_one() -> None:
    noise = random.Random(2)
    for _ in range(50):
        seed, generation, round_, position = noise.getrandbits(64), *(noise.getrandbits(32) for _ in range(3))
        assert byspec.draw_u24(seed, generation, round_, position) == rng.draw24(
            seed, rng.Domain.PROPOSAL, generation, round_, position
        )
    assert len(Reason) == byspec.REASONS
    assert set(KINDS) == set(Mutator(noise, False)._how)


def test_the_oracle_imports_nothing_that_it_judges() -> None:
    folder = Path(byspec.__file__).parent
    for name in ("byspec", "oracle"):
        lines = [line for line in (folder / f"{name}.py").read_text().splitlines() if line.startswith(("from .", "import "))]
        assert {line.split()[1] for line in lines} <= {".", ".byspec", "struct", "numpy", "xxhash"}, lines
