"""Deployments of one rank: daemons in processes of their own, under traffic, signals, upgrades, absences and several targets."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from daemon_rig import PROMPT, SMALL, VOCAB, WATCHDOG_S, Bed, Target, answer, command, drafting, free_port, two_targets
from journal_check import check_tokens, digest_of, histories, rounds_of

from pp1q_transport.client import Step, attach_leader, attach_receiver
from pp1q_transport.errors import ConfigError, PeerFault, ProposalDiscarded, Reason
from pp1q_transport.toy.models import ToyModels

pytestmark = pytest.mark.timeout(120)

LONG_US = 4_000_000_000


@pytest.fixture
def bed() -> Iterator[Bed]:
    """Both daemons of one rank, nobody beside them."""
    with Bed() as made:
        yield made.up()


# ---- the whole ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("support", (None, 16), ids=("dense", "sparse"))
def test_tokens_are_those_of_the_embedded_engine(support: int | None) -> None:
    shape = dataclasses.replace(SMALL, rounds=120, support=support, requests=3)
    with Bed(shape) as deployment:
        deployment.start_all()
        assert deployment.wait("target0", WATCHDOG_S) == 0
        report = json.loads((deployment.home / "target0.json").read_text(encoding="utf-8"))
        slots = deployment.status("receiver0")["slots"]
        ends = deployment.stop()
        assert check_tokens(shape, rounds_of(deployment.home / "target0.journal")) == report["committed"]
    words = ["--rounds", "120", "--requests", "3", "--depth", "3", "--vocab", str(VOCAB), "--seed", "7", "--json", "--tokens"]
    embedded = command("demo", *words, *(["--sparse", str(support)] if support else []))
    assert embedded.returncode == 0, embedded.stderr
    assert report["ready"] == 120
    assert report["tokens"] == json.loads(embedded.stdout)["tokens"]
    assert all(count == 0 for state, count in slots.items() if state != "FREE")
    assert ends["leader"] == ends["receiver0"] == 0


def test_sigterm_to_each_daemon_during_traffic_drains_it_and_the_target_goes_on() -> None:
    with Bed() as deployment:
        deployment.start_all()
        journal = deployment.home / "target0.journal"
        for name in ("leader", "receiver0", "leader", "receiver0"):
            before = len(ready_of(journal))
            deployment.until(lambda before=before: len(ready_of(journal)) > before + 4, "some rounds")
            deployment.signal(name, signal.SIGTERM)
            assert deployment.wait(name, WATCHDOG_S) == 0, deployment.tail(name)
            assert not (deployment.home / f"{name}.sock").exists()
            deployment.start(name)
            deployment.wait_for_daemon(name)
            gone_on = time.monotonic_ns()
            deployment.until(lambda since=gone_on: any(e["issued_ns"] > since for e in ready_of(journal)), "ready again")
        for name in ("leader", "receiver0"):  # of all its lives: twice it left, twice the other did
            deployment.says(name, '"goodbye": true', 4)
        for name, others in (("leader", "receiver0"), ("receiver0", "leader")):
            assert "peer_lost" not in deployment.status(name).get("discards", {}), f"{others} took its leave"
        assert deployment.parts["target0"].starts == deployment.parts["draft"].starts == 1
        deployment.kill("target0")
        entries = rounds_of(journal)
        histories(entries)
        assert check_tokens(deployment.shape, entries) > 20


def ready_of(journal: object) -> list[dict[str, object]]:
    return [entry for entry in rounds_of(journal) if entry["drafted"] is not None]  # type: ignore[arg-type]


def test_a_rolling_upgrade_loses_nothing_and_both_ends_agree_on_every_token(bed: Bed) -> None:
    with drafting(bed) as draft, bed.receiver() as receiver:
        target = Target(bed, receiver)
        receiver.wait_for_peer()
        requests = [receiver.open_request(number, PROMPT, seed=100 + number) for number in (1, 2)]
        for name in ("leader", "receiver0"):
            for request in requests:
                target.until_ready(request)
            bed.signal(name, signal.SIGTERM)
            while bed.parts[name].running:
                for request in requests:
                    target.round(request)
            assert bed.wait(name, WATCHDOG_S) == 0
            bed.start(name)
            bed.wait_for_daemon(name)
        for request in requests:
            target.until_ready(request)
            target.until_ready(request)
        assert set(target.reasons) <= {Reason.CANCELLED, Reason.PEER_LOST}
        bed.until(lambda: all(known(draft, r.request) == r.tokens.tolist() for r in requests), "the draft knows every token")
        theirs = dict(draft.leader._targets[0].requests.requests)
        for request in requests:
            digest = (request.prefix_low, request.prefix_high)
            assert digest == digest_of(request.tokens.tolist())
            assert digest == (theirs[request.request].prefix_low, theirs[request.request].prefix_high)


def known(draft: object, number: int) -> list[int]:
    """What an attached draft in a thread knows of a request of its first target (an empty list while it knows none)."""
    request = draft.leader._targets[0].requests.get(number)  # type: ignore[attr-defined]
    return request.tokens.tolist() if request is not None else []


def test_a_proposal_that_is_held_is_waited_for_and_then_the_drain_is_cut_short() -> None:
    with Bed() as bed:
        bed.edit("receiver0", lambda text: text.replace("drain_s = 2.0", "drain_s = 0.5"))
        bed.up()
        with drafting(bed), bed.receiver() as receiver:
            receiver.wait_for_peer()
            request = receiver.open_request(1, PROMPT, seed=1)
            held = receiver.step(request, support=16)
            bed.signal("receiver0", signal.SIGTERM)
            bed.until(lambda: receiver.poll() or receiver.draining, "the target is told")
            with pytest.raises(ProposalDiscarded) as discarded:
                receiver.enqueue(receiver.open_request(2, PROMPT, seed=2), support=16)
            assert discarded.value.reason is Reason.CANCELLED
            assert bed.wait("receiver0", WATCHDOG_S) == 3
            assert "cut short" in bed.tail("receiver0")
            held.release()


def test_the_in_flight_ends_before_the_daemon_does(bed: Bed) -> None:
    """The draft answers slowly: the drain of either daemon waits for it."""
    for name in ("leader", "receiver0"):
        with drafting(bed) as draft, bed.receiver() as receiver:

            def slowly(models: ToyModels, step: Step, name: str = name) -> None:
                bed.says(name, "draining")
                answer(models, step)

            receiver.wait_for_peer()
            draft.act = slowly
            request = receiver.open_request(1, PROMPT, seed=1)
            ticket = receiver.enqueue(request, support=16)
            bed.until(lambda draft=draft: draft.served, "the draft has it")
            bed.signal(name, signal.SIGTERM)
            with ticket.wait() as proposal:
                assert proposal.depth == 3
            assert bed.wait(name, WATCHDOG_S) == 0
        bed.up(name)
        bed.sessions_up()


# ---- reload, check, sockets -------------------------------------------------------------------------------------------


def test_sighup_takes_over_what_can_change_and_names_what_can_not(bed: Bed) -> None:
    with drafting(bed), bed.receiver() as receiver:
        target = Target(bed, receiver)
        receiver.wait_for_peer()
        request = receiver.open_request(1, PROMPT, seed=1)
        target.until_ready(request)
        good = bed.config("receiver0").read_text(encoding="utf-8")

        bed.edit("receiver0", lambda text: text.replace("drain_s = 2.0", "drain_s = 9.0") + "[breaker]\ndiscards = 3\n")
        bed.signal("receiver0", signal.SIGHUP)
        bed.until(lambda: bed.counters("receiver0").get("reloads") == 1, "reloaded")
        bed.says("receiver0", "breaker.discards")
        assert target.round(request)

        bed.edit("receiver0", lambda _text: "[daemon]\nrole = 'receiver'\nnonsense = 1\n")
        bed.signal("receiver0", signal.SIGHUP)
        bed.until(lambda: bed.counters("receiver0").get("reloads_refused") == 1, "refused")
        assert target.round(request)

        bed.edit("receiver0", lambda _text: good.replace("depth = 3", "depth = 4"))
        bed.signal("receiver0", signal.SIGHUP)
        bed.says("receiver0", "needs_restart")
        bed.says("receiver0", "session.depth")
        assert target.round(request)
        assert target.reasons == []


def test_a_burst_of_sighups_is_no_sigterm(bed: Bed) -> None:
    for _ in range(60):
        bed.signal("leader", signal.SIGHUP)
        time.sleep(0.003)
    bed.until(lambda: bed.counters("leader").get("reloads", 0) >= 2, "reloaded")
    assert not bed.status("leader")["draining"]
    assert "draining" not in bed.parts["leader"].log.read_text(encoding="utf-8")


def test_check_judges_a_file_and_starts_nothing() -> None:
    with Bed() as bed:
        judged = command("daemon", "--config", str(bed.config("leader")), "--check")
        assert (judged.returncode, judged.stderr) == (0, "")
        assert "valid" in judged.stdout
        as_json = json.loads(command("daemon", "--config", str(bed.config("leader")), "--check", "--json").stdout)
        assert as_json["valid"] is True
        assert not list(bed.home.glob("*.sock*"))
        bed.edit("leader", lambda text: text.replace("depth = 3", "depth = 300"))
        refused = command("daemon", "--config", str(bed.config("leader")), "--check")
        assert refused.returncode == 2
        assert len(refused.stderr.splitlines()) == 1
        assert "depth" in refused.stderr


def test_a_second_daemon_on_one_socket_is_refused_and_the_first_does_not_notice(bed: Bed) -> None:
    second = command("daemon", "--config", str(bed.config("receiver0")))
    assert second.returncode == 2
    assert f"another daemon (pid {bed.pid('receiver0')})" in second.stderr
    assert len(second.stderr.strip().splitlines()) == 1
    assert bed.status("receiver0")["sessions"][0]["up"]


@pytest.mark.parametrize("name", ("leader", "receiver0"))
def test_a_socket_that_a_kill_left_is_replaced(bed: Bed, name: str) -> None:
    bed.kill(name)
    assert (bed.home / f"{name}.sock").exists()
    with pytest.raises(ConfigError, match="start `pp1q daemon`"):
        (attach_leader if name == "leader" else attach_receiver)(bed.socket(name))
    bed.up(name)
    bed.sessions_up()
    assert sorted(path.name for path in bed.home.glob("*.sock*")) == ["leader.sock", "receiver0.sock"]


def test_who_may_not_attach_is_told_why(bed: Bed) -> None:
    with bed.receiver() as receiver, attach_leader(bed.socket("leader")):
        receiver.wait_for_peer()
        cases: list[tuple[Callable[[], object], Reason, str]] = [
            (lambda: attach_receiver(bed.socket("receiver0")), Reason.OVERLOAD, "attached already"),
            (lambda: attach_leader(bed.socket("leader")), Reason.OVERLOAD, "attached already"),
            (lambda: attach_leader(bed.socket("receiver0")), Reason.SEMANTIC_MISMATCH, "receiver's daemon"),
            (lambda: attach_receiver(bed.socket("leader")), Reason.SEMANTIC_MISMATCH, "leader's daemon"),
            (lambda: attach_receiver(bed.socket("receiver0"), 1), Reason.IDENTITY_MISMATCH, "rank 0"),
        ]
        for attach, reason, words in cases:
            with pytest.raises(PeerFault, match=words) as refused:
                attach()
            assert refused.value.reason is reason
        assert bed.counters("receiver0")["clients_refused"] == 3
        assert bed.counters("leader")["clients_refused"] == 2
        assert [each["rank"] for each in bed.status("receiver0")["clients"]] == [0]


# ---- absences ---------------------------------------------------------------------------------------------------------


def test_steps_for_an_absent_draft_are_answered_at_once(bed: Bed) -> None:
    """Their budget is over an hour: a test that waited for it would run into its own limit."""
    with bed.receiver() as receiver:
        target = Target(bed, receiver)
        receiver.wait_for_peer()
        request = receiver.open_request(1, PROMPT, seed=1)
        for _ in range(20):
            assert not target.round(request, LONG_US)
        with drafting(bed):
            bed.wait_for_client("leader")
            assert target.round(request, LONG_US)
        for _ in range(3):
            target.round(request, LONG_US)
        assert set(target.reasons) == {Reason.PEER_LOST}
        assert bed.status("receiver0")["breakers"][0]["state"] == "closed", "a lost draft has its own backoff"


def test_the_breaker_opens_after_discards_in_a_row_and_closes_when_the_draft_recovers() -> None:
    breaker = "\n[breaker]\ndiscards = 3\nprobe_after_s = 0.05\nprobe_most_s = 0.1\n"
    with Bed(tables={"receiver0": breaker}) as bed:
        bed.up()
        with drafting(bed) as draft, bed.receiver() as receiver:
            target = Target(bed, receiver)
            receiver.wait_for_peer()
            request = receiver.open_request(1, PROMPT, seed=1)
            draft.act = lambda _models, step: step.fail(Reason.OVERLOAD)
            for _ in range(3):
                assert not target.round(request)
            assert target.reasons == [Reason.OVERLOAD] * 3
            assert bed.status("receiver0")["breakers"] == [{"peer": "leader", "state": "open", "opened": 1}]
            served = len(draft.served)
            assert not target.round(request)
            assert target.reasons[-1] is Reason.CIRCUIT_OPEN
            assert len(draft.served) == served, "an open breaker sends nothing"
            draft.act = answer
            target.until_ready(request)
            assert bed.status("receiver0")["breakers"] == [{"peer": "leader", "state": "closed", "opened": 1}]
            assert target.round(request)


def test_a_proposal_held_too_long_goes_to_quarantine_and_is_free_once_released() -> None:
    with Bed(tables={"receiver0": "\n[watch]\nrelease_after_s = 0.2\n"}) as bed:
        bed.up()
        with drafting(bed), bed.receiver() as receiver:
            receiver.wait_for_peer()
            request = receiver.open_request(1, PROMPT, seed=1)
            proposal = receiver.step(request, support=16)
            bed.until(lambda: bed.status("receiver0")["slots"]["QUARANTINE"] == 1, "overdue")
            assert bed.counters("receiver0")["overdue"] == 1
            assert proposal.q(0).values.sum() == pytest.approx(1.0), "quarantine takes nothing from who still reads"
            proposal.release()
            bed.until(lambda: bed.status("receiver0")["slots"]["FREE"] == 4, "free again")
            receiver.commit_target_only(request, 0, [5])
            assert Target(bed, receiver).round(request)


def test_a_stopped_leader_does_not_stop_the_receiver_daemon(bed: Bed) -> None:
    """Sixty OPENs of long histories are more than the link takes: they wait, nobody else does."""
    with drafting(bed), bed.receiver() as receiver:
        target = Target(bed, receiver)
        receiver.wait_for_peer()
        bed.signal("leader", signal.SIGSTOP)
        history = [index % VOCAB for index in range(60_000)]
        requests = [receiver.open_request(number, history, seed=number) for number in range(1, 61)]
        for _ in range(5):
            bed.status("receiver0")  # which must come before long
        assert not target.round(requests[-1], 100_000)
        for request in requests[20:40]:
            receiver.close_request(request)
        assert bed.status("receiver0")["sessions"][0]["up"]
        bed.signal("leader", signal.SIGCONT)
        for request in (requests[0], requests[-1]):
            target.until_ready(request)
        assert bed.counters("receiver0")["sessions"] == 1
        assert set(target.reasons) <= {Reason.OVERLOAD, Reason.TIMEOUT}


def test_a_draft_hears_every_token_once_even_when_open_and_commits_come_together(bed: Bed) -> None:
    with drafting(bed) as draft, bed.receiver() as receiver:
        receiver.wait_for_peer()
        bed.signal("leader", signal.SIGSTOP)
        request = receiver.open_request(1, PROMPT, seed=1)
        for number in range(8):
            receiver.commit_target_only(request, number, [3 + number])
            request.next_round()
        bed.until(lambda: bed.status("receiver0")["loops"] > 3, "sent")
        bed.signal("leader", signal.SIGCONT)
        target = Target(bed, receiver)
        target.until_ready(request)
        bed.until(lambda: known(draft, 1) == request.tokens.tolist(), "the draft knows every token once")


# ---- looking at it ------------------------------------------------------------------------------------------------------


def test_top_and_metrics_show_a_live_daemon() -> None:
    port = free_port()
    with Bed() as bed:
        bed.edit("receiver0", lambda text: text.replace("drain_s", f'metrics = "127.0.0.1:{port}"\ndrain_s'))
        bed.up()
        with drafting(bed), bed.receiver() as receiver:
            receiver.wait_for_peer()
            target = Target(bed, receiver)
            request = receiver.open_request(1, PROMPT, seed=1)
            assert all(target.round(request) for _ in range(5))
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answered:
                lines = answered.read().decode().splitlines()
            assert [line for line in lines if not line.startswith("#") and "ready" in line and line.endswith(" 5.0")], lines
            shown = command("top", "--once", bed.socket("leader"), bed.socket("receiver0"))
            assert shown.returncode == 0, shown.stderr
            assert "clients  draft 0 pid" in shown.stdout
            assert "5 rounds" in shown.stdout
            assert "breaker closed" in shown.stdout
            bed.kill("leader")
            assert command("top", "--once", bed.socket("leader"), bed.socket("receiver0")).returncode == 1


# ---- several targets ------------------------------------------------------------------------------------------------


def test_two_targets_of_one_leader_get_their_turns_whatever_one_of_them_asks_for() -> None:
    with two_targets() as bed:
        bed.up()
        with drafting(bed) as draft, bed.receiver() as flooding, bed.receiver("receiverb") as modest:
            flooding.wait_for_peer()
            modest.wait_for_peer()
            many, one = Target(bed, flooding), Target(bed, modest)
            requests = [flooding.open_request(number, PROMPT, seed=number) for number in range(1, 9)]
            single = modest.open_request(1, PROMPT, seed=77)
            assert all(many.round(request) for request in requests[:2])
            assert one.round(single)
            draft.served.clear()
            tickets = [flooding.enqueue(request, support=16) for request in requests]
            for _ in range(12):
                assert one.round(single)
                tickets = [renew(many, ticket) for ticket in tickets]
            order = [target for target, _request, _round in draft.served]
            places = [index for index, target in enumerate(order) if target == 1]
            assert len(places) == 12
            # The one STEP of the modest target is not behind all eight of the other: turns are taken by target.
            between = [later - earlier - 1 for earlier, later in pairwise(places)]
            assert sum(between) <= len(requests) * len(between), between
            assert order.count(0) >= 12, "and the other one is served as well"
            assert {ticket.wait().depth for ticket in tickets} == {3}
            bed.kill("receiver0")
            assert one.round(single), "the death of one target's daemon is nothing to the other"


def renew(target: Target, ticket: object) -> object:
    """A ticket whose proposal is there is committed, and the next STEP of its request is asked for."""
    if not ticket.settled:  # type: ignore[attr-defined]
        return ticket
    request, proposal = ticket.request, ticket.wait()  # type: ignore[attr-defined]
    proposal.commit(0, [5])
    return target.receiver.enqueue(request, support=16)
