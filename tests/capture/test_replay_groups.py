"""Captures of the ranks of a group, and of a draft: each rank's own file, judged again, comes to what that rank counted live."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from capture_rig import recorded, replayed

from pp1q_transport import wire
from pp1q_transport.capture import records
from pp1q_transport.capture.group_replay import EXCHANGES
from pp1q_transport.capture.link_replay import Outcome
from pp1q_transport.capture.pcapng import CaptureError
from pp1q_transport.capture.reading import Record
from pp1q_transport.capture.replay import Replay
from pp1q_transport.errors import Reason
from pp1q_transport.toy.sidecar import Deployment, Shape
from pp1q_transport.wire import Header

sys.path.insert(0, str(Path(__file__).parents[1] / "daemon"))
from daemon_rig import WATCHDOG_S, Bed
from kill_world import KillWorld

pytestmark = pytest.mark.timeout(240)

MODES = (("replicate", 16), ("vocabulary", None), ("vocabulary", 16), ("request-owner", 16))
NAMES = [f"{mode} {'dense' if support is None else 'sparse'}" for mode, support in MODES]
FILES = 4


def capturing(deployment: Deployment, folder: Path, more: str = "") -> None:
    """Has every daemon write a capture, each into a file of its name."""
    for name in deployment.daemons:
        path = deployment.home / f"{name}.toml"
        text = path.read_text(encoding="utf-8")
        path.write_text(f"{text}\n[capture]\nfile = {json.dumps(str(folder / name))}\n{more}", encoding="utf-8")


@cache
def captured(
    mode: str, support: int | None, ranks: int = 2, draft_ranks: int = 1, vocab: int = 500, rounds: int = 24
) -> dict[str, list[bytes]]:
    """By daemon: the files that a whole deployment of honest processes left, newest first."""
    import tempfile

    shape = Shape(
        seed=7, rounds=rounds, depth=3, vocab_size=vocab, support=support, requests=3, ranks=ranks, budget_us=200_000_000,
        mode=mode, draft_ranks=draft_ranks,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name, Bed(shape) as bed:
        capturing(bed, Path(name), "file_mib = 1\n")
        bed.start_all()
        for rank in range(ranks):
            assert bed.wait(f"target{rank}", 2 * WATCHDOG_S) == 0, bed.tail(f"target{rank}", 12)
        for part in list(bed.parts):
            if part.startswith("draft"):
                bed.kill(part)
        bed.stop()
        found = {}
        for daemon in bed.daemons:
            paths = [Path(name) / daemon, *(Path(name) / f"{daemon}.{number}" for number in range(1, FILES))]
            found[daemon] = [path.read_bytes() for path in paths if path.exists()]
        return found


def same_as_live(outcome: Outcome) -> None:
    assert outcome.differs == []
    assert set(outcome.skipped) <= {EXCHANGES}
    assert outcome.compared == outcome.sessions > 0


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "support"), MODES, ids=NAMES)
def test_every_rank_counts_again_what_it_counted_live(mode: str, support: int | None) -> None:
    files = captured(mode, support)
    for rank in range(2):
        (data,) = files[f"receiver{rank}"]
        outcome = replayed(data)
        same_as_live(outcome)
        assert outcome.ready == 24
        assert outcome.sessions == (1 if (mode, rank) == ("replicate", 1) else 2)
        assert outcome.accepted == outcome.frames > 24 * 3


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "support"), (("replicate", None), ("vocabulary", None)))
def test_a_file_that_begins_in_the_middle_replays_by_itself(mode: str, support: int | None) -> None:
    """Rotated: the state it begins with holds epoch, votes, claims, and who holds a slot."""
    files = captured(mode, support, vocab=20_000, rounds=40)
    for rank in range(2):
        assert len(files[f"receiver{rank}"]) > 1
        for data in files[f"receiver{rank}"]:
            same_as_live(replayed(data))


@pytest.mark.slow
def test_the_ranks_of_a_draft_count_again_as_well() -> None:
    files = captured("replicate", 16, ranks=1, draft_ranks=2)
    peer = replayed(files["leader1"][0])
    same_as_live(peer)
    assert peer.frames > 24 * 4  # a STEP and three TOKENs each
    leader = replayed(files["leader"][0])
    assert leader.differs == []
    assert leader.skipped == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "mode", "draft_ranks"), ((3, "replicate", 1), (2, "vocabulary", 1), (2, "request-owner", 1), (1, "replicate", 2))
)
def test_deaths_are_counted_again(ranks: int, mode: str, draft_ranks: int, tmp_path: Path) -> None:
    """kill -9 of every process: what the survivors' files say of lost links, void proposals and epochs is what they counted."""
    kept: list[Path] = []
    with KillWorld(ranks, seed=31, support=16, mode=mode, draft_ranks=draft_ranks) as world:
        capturing(world.deployment, tmp_path)
        kill = world.deployment.kill

        def keep(name: str) -> None:
            kill(name)
            if (tmp_path / name).exists():
                kept.append(Path(shutil.copy(tmp_path / name, tmp_path / f"{name}-{len(kept)}")))

        world.deployment.kill = keep  # type: ignore[method-assign]
        world.start()
        order = world.victims * 2
        world.random.shuffle(order)
        for victim in order:
            world.kill(victim)
        world.finish()
        kept += [tmp_path / name for name in world.deployment.daemons]
    assert len(kept) > 3 * ranks
    discarded = 0
    for path in kept:
        outcome = replayed(path.read_bytes())
        assert outcome.differs == [], path.name
        assert set(outcome.skipped) <= {EXCHANGES}, path.name
        discarded += outcome.discards.get("peer_lost", 0)
    assert discarded > 0


# -- a replay that is not what happened is noticed ---------------------------------------------------------------------


def frames_of(taken: list[Record], kind: int, incoming: bool) -> Iterator[tuple[int, Record, Header]]:
    for at, record in enumerate(taken):
        header = Header()
        if record.what != records.FRAME or record.incoming != incoming or header.decode(record.data, 0):
            continue
        if header.kind == kind:
            yield at, record, header


def bent(taken: list[Record], kind: int, incoming: bool, change: Callable[[Header], None], nth: int = -1) -> list[Record]:
    """The records with one frame changed and signed again: the last of its kind, whose slot is granted to nobody after it."""
    at, record, header = list(frames_of(taken, kind, incoming))[nth]
    change(header)
    frame = bytearray(record.data)
    header.encode(frame, 0)
    return [*taken[:at], record._replace(data=bytes(frame)), *taken[at + 1 :]]


def without(taken: list[Record], kind: int, incoming: bool, nth: int = -1) -> list[Record]:
    """The records without one frame."""
    at = list(frames_of(taken, kind, incoming))[nth][0]
    return taken[:at] + taken[at + 1 :]


def setting(name: str, value: int) -> Callable[[Header], None]:
    return lambda header: setattr(header, name, value)


MASS = Reason.MASS.code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "bend", "says"),
    (
        (0, lambda t: bent(t, wire.VOTE, True, setting("status", MASS)), "in the replay for length_bounds"),  # it has a claim
        (0, lambda t: without(t, wire.VOTE, True), "decision ready"),
        (0, lambda t: bent(t, wire.DECIDE, False, setting("status", MASS)), "decision mass"),
        (0, lambda t: bent(t, wire.REPLY, True, setting("shard_mass", 1)), "decision mass"),
        (1, lambda t: bent(t, wire.VOTE, False, setting("status", MASS)), "vote mass"),
        (1, lambda t: bent(t, wire.REPLY, True, setting("shard_mass", 1)), "vote mass"),
        (1, lambda t: bent(t, wire.DECIDE, True, setting("status", MASS)), "mass 0 times live, 1 in the replay"),
        (1, lambda t: without(t, wire.GRANT, True), "asked for live, not granted in the replay"),
    ),
    ids=("another vote", "no vote", "another decision", "another row", "another vote of ours", "another row of ours",
         "another decision at a member", "no grant"),
)  # fmt: skip
def test_what_did_not_happen_so_is_a_difference(
    rank: int, bend: Callable[[list[Record]], list[Record]], says: str
) -> None:
    taken = recorded(captured("vocabulary", 16)[f"receiver{rank}"][0])
    assert Replay().run(taken).differs == []
    differs = Replay().run(bend(taken)).differs
    assert any(says in line for line in differs), differs


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "status"), ((wire.VOTE, len(Reason) + 1), (wire.LEAVE, len(Reason) + 1), (wire.LEAVE, 0)))
def test_a_word_of_the_rank_s_own_for_no_reason_is_a_fault_of_the_file(kind: int, status: int) -> None:
    def change(header: Header) -> None:
        header.kind, header.status = kind, status
        header.state_low = header.state_high = header.floor = 0

    taken = recorded(captured("vocabulary", 16)["receiver1"][0])
    with pytest.raises(CaptureError, match="that no rank sends"):
        Replay().run(bent(taken, wire.VOTE if kind == wire.VOTE else wire.AGREE, False, change))


@pytest.mark.slow
def test_a_late_exchange_may_be_counted_where_there_were_exchanges() -> None:
    """They are passed over; one of an epoch that is over counts generation_stale: so it may where there was one, nowhere else."""
    for mode, exchanged in (("vocabulary", True), ("request-owner", False)):
        taken = recorded(captured(mode, 16)["receiver0"][0])
        ends = [at for at, record in enumerate(taken) if record.what == records.END]
        for at in ends:
            body = json.loads(taken[at].data)
            reasons = body["counted"]["reasons"]
            reasons["generation_stale"] = reasons.get("generation_stale", 0) + 1
            taken[at] = taken[at]._replace(data=records.pack_json(body))
        differs = Replay().run(taken).differs
        assert len([line for line in differs if "generation_stale" in line]) == len(ends) - exchanged, differs


@pytest.mark.slow
@pytest.mark.parametrize("rank", (0, 1))
def test_a_bent_state_is_named_or_harmless(rank: int) -> None:
    """The state of a group comes from a file, which anybody may have written."""
    noise = random.Random(5)
    taken = recorded(captured("vocabulary", None, vocab=20_000, rounds=40)[f"receiver{rank}"][0])
    states = [at for at, record in enumerate(taken) if record.what == records.STATE]
    refused = 0
    for _ in range(150):
        at = noise.choice(states)
        body = json.loads(taken[at].data)
        spoil(body["group"], noise)
        changed = [*taken[:at], taken[at]._replace(data=json.dumps(body).encode()), *taken[at + 1 :]]
        try:
            Replay().run(changed)
        except CaptureError:
            refused += 1
    assert refused > 20


def spoil(whole: Any, noise: random.Random) -> None:
    """One value somewhere inside becomes another."""
    while True:
        keys = list(whole) if isinstance(whole, dict) else list(range(len(whole)))
        key = noise.choice(keys)
        inner = whole[key]
        if isinstance(inner, dict | list) and inner and noise.random() < 0.8:
            whole = inner
            continue
        whole[key] = noise.choice((0, 1, 2, 3, 7, -1, 1 << 32, 1 << 70, None, "", "ready", [], {}, [[]], True, 1.5))
        return


def test_a_group_link_without_its_state_is_skipped_and_named() -> None:
    body = {
        "format": 1, "redacted": False, "session": 1, "requests": [], "slots": [], "account": 0, "ours": hello("member"),
        "theirs": hello("coordinator"), "counted": {"reasons": {}, "discards": {}, "ready": 0},
    }  # fmt: skip
    outcome = Replay().run([Record(0, records.STATE, False, False, 0, 0, json.dumps(body).encode())])
    assert outcome.skipped == {"member with coordinator: the file does not say where the group stood": 1}


def hello(role: str) -> dict[str, Any]:
    from pp1q_transport.capture.snapshot import _hello
    from pp1q_transport.session.hello import Hello, Role

    return _hello(Hello(role=Role(role), boot_nonce=5, link_nonce=bytes(16), group_size=2, rank=int(role == "member")))  # type: ignore[call-arg]
