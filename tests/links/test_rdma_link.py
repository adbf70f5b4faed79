"""What only an rdma link can do: lose a queue pair and go on, revoke a key, refuse a fork, and leave nothing behind.

On a device where there is one (the machine of tests/rdma/vm has three), and on verbs that are played; asserts on contents,
completion statuses and queue-pair states, never on time.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from played_verbs import PlayedDevice
from test_conformance import End, Pair, encoded, ending, grant, join_over, make_played, make_rdma, noise, until

from pp1q_transport import wire
from pp1q_transport.errors import ConfigError, LocalMisuse, PeerFault, Reason
from pp1q_transport.links.rdma import FRUITLESS_AT_MOST, RdmaLink
from pp1q_transport.links.rdma_config import RdmaConfig
from pp1q_transport.links.rdma_connection import NO_LANDING, Phase, RdmaConnection
from pp1q_transport.links.rdma_device import Device
from pp1q_transport.links.rdma_verbs import alive

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=("device", "played"))
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    yield from ends(make_rdma if request.param == "device" else make_played)


@pytest.fixture
def real() -> Iterator[Pair]:
    """Over a device only: what is about pyverbs and the kernel."""
    yield from ends(make_rdma)


def ends(make: Callable[[], Pair]) -> Iterator[Pair]:
    made = make()
    yield made
    device = link(made.left).connection.device
    made.left.link.close()
    made.right.link.close()
    device.close()


def link(end: End) -> RdmaLink:
    assert isinstance(end.link, RdmaLink)
    return end.link


def taken(pair: Pair) -> list[int]:
    """The numbers of the frames that arrived at the right end."""
    return [number for number, _ in pair.right.sink.frames]


# ---- a queue pair in error ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ("left", "right"))
def test_a_queue_pair_in_error_is_made_anew_and_nothing_but_rows_is_lost(pair: Pair, side: str) -> None:
    """Frames on the way when it breaks: those that are no rows all arrive, once and in order; rows arrive or are counted as
    lost."""
    first = link(pair.left).connection.pair
    numbers = []
    for number in range(40):
        if number % 4 == 3:
            pair.left.frame(number, noise(number, 20_000), slot=number % 2)
        else:
            pair.left.frame(number, kind=wire.CLOSE)
            numbers.append(number)
    for _ in range(2):
        pair.left.link.pump(0)
        pair.right.link.pump(0)
    link(getattr(pair, side)).connection.pair.fail()
    until(lambda: 38 in taken(pair) and link(pair.left).connection.up, pair.left, pair.right)
    arrived = taken(pair)
    assert [number for number in arrived if number % 4 != 3] == numbers
    assert arrived == sorted(set(arrived))
    assert len(arrived) + link(pair.left).rows_lost >= 39  # the last row may be on its way still
    for number, payload in pair.right.sink.frames:
        assert payload == (noise(number, 20_000) if number % 4 == 3 else b"")
    second = link(pair.left).connection.pair
    assert second is not first
    assert first.state == "CLOSED"
    assert second.state == "RTS"
    assert link(pair.left).connection.life == link(pair.right).connection.life == 1
    assert link(pair.left).connection.counters.get("queue_pairs_made_anew") == 1


def test_each_queue_pair_has_a_number_to_begin_with_of_its_own(pair: Pair) -> None:
    """A packet of an earlier life must not fit into a later one by its sequence number."""
    seen = set()
    for round_ in range(4):
        seen.update(link(end).connection.pair.psn for end in (pair.left, pair.right))
        link(pair.left).connection.pair.fail()
        pair.left.frame(round_, kind=wire.CLOSE)
        until(lambda n=round_: n in taken(pair), pair.left, pair.right)  # type: ignore[misc]
    assert len(seen) == 8


def test_a_frame_in_many_messages_survives_a_queue_pair(pair: Pair) -> None:
    raw = encoded(1, noise(1, 300_000), slot=1)[1]
    pair.left.raw(raw[:150_000])
    until(lambda: pair.right.sink.accepted == 1, pair.left, pair.right)
    link(pair.left).connection.pair.fail()
    pair.left.raw(raw[150_000:])
    until(lambda: taken(pair) == [1], pair.left, pair.right)
    assert pair.right.sink.frames == [(1, noise(1, 300_000))]


def test_queue_pairs_that_move_nothing_end_the_link(pair: Pair) -> None:
    while not (link(pair.left).broken or link(pair.right).broken):
        if link(pair.left).connection.up and link(pair.right).connection.up:
            link(pair.left).connection.pair.fail()
        for end in (pair.left, pair.right):
            end.link.pump(0)
    broken = pair.left if link(pair.left).broken else pair.right
    assert Reason.from_code(link(broken).broken) is Reason.LINK_ERROR
    assert link(broken).connection.life == FRUITLESS_AT_MOST


def test_a_peer_that_leaves_while_the_queue_pair_is_made_anew_is_lost(pair: Pair) -> None:
    link(pair.right).connection.pair.fail()
    pair.left.link.close()
    assert ending(pair.right) is Reason.PEER_LOST


def test_keys_and_what_is_sent_again_share_no_message(pair: Pair) -> None:
    """The largest messages go again while a fence has a key to tell: neither spoils the other."""
    payload = noise(1, 100_000)
    pair.right.raw(encoded(1, payload)[1][:60_000])
    pair.right.raw(encoded(1, payload)[1][60_000:])
    link(pair.left).connection.pair.fail()
    pair.right.link.pump(0)
    while not (link(pair.right).connection.up and link(pair.left).connection.up):
        pair.right.link.fence(1)
        for end in (pair.left, pair.right):
            end.link.pump(0)
    until(lambda: pair.left.sink.frames == [(1, payload)], pair.left, pair.right)
    pair.left.frame(2, noise(2, 20_000), slot=1)
    until(lambda: taken(pair) == [2], pair.left, pair.right)


def test_ends_of_different_queue_depths_hear_of_credit_in_time() -> None:
    """The smaller depth counts, also for how long a report may wait."""
    made = join_over(PlayedDevice(queue_depth=64), None, PlayedDevice(queue_depth=8, receive_bytes=4608))
    sent = [(number, noise(number, 300_000)) for number in range(3)]
    for end, other in ((made.left, made.right), (made.right, made.left)):
        for number, payload in sent:
            end.raw(encoded(number, payload)[1][:200_000])
            end.raw(encoded(number, payload)[1][200_000:])
        until(lambda sink=other.sink: sink.frames == sent, made.left, made.right)  # type: ignore[misc]
    assert made.left.link.describe()["queue_depth"] == made.right.link.describe()["queue_depth"] == 8
    assert made.left.link.describe()["message_bytes"] == made.right.link.describe()["message_bytes"] == 4608
    made.left.link.close()
    made.right.link.close()


# ---- fences -------------------------------------------------------------------------------------------------------------


def test_a_row_for_a_fenced_slot_lands_nowhere_and_the_link_goes_on(pair: Pair) -> None:
    """The sender has not heard of the fence: its device is refused, the queue pair is made anew, the row is counted as lost."""
    right = link(pair.right)
    before = bytes(right.connection.landing.view)
    assert pair.right.link.fence(1) is False
    pair.left.frame(1, noise(1, 20_000), slot=1)
    pair.left.frame(2, kind=wire.CLOSE)
    until(lambda: 2 in taken(pair), pair.left, pair.right)
    assert taken(pair) == [2]
    assert bytes(right.connection.landing.view) == before
    assert link(pair.left).rows_lost == 1
    if isinstance(right.connection.device, PlayedDevice):  # Soft-RoCE keeps that to itself
        counters = [link(end).connection.counters.get("rdma_event_qp_access_err") for end in (pair.left, pair.right)]
        assert sum(counters) == 1, "the refused write was not heard of"
    pair.left.frame(3, noise(3, 20_000), slot=1)
    until(lambda: 3 in taken(pair), pair.left, pair.right)
    assert pair.right.sink.frames[-1] == (3, noise(3, 20_000))
    assert link(pair.left).connection.life == 1


def test_a_sender_that_heard_of_the_fence_writes_with_the_new_key(pair: Pair) -> None:
    for slot in (0, 1):
        pair.right.link.fence(slot)
    grant(pair)
    for number in (1, 2):
        pair.left.frame(number, noise(number, 20_000), slot=number - 1)
    until(lambda: len(taken(pair)) == 2, pair.left, pair.right)
    assert link(pair.left).connection.life == 0
    assert link(pair.left).rows_lost == 0


def test_every_fence_makes_another_key(pair: Pair) -> None:
    connection = link(pair.right).connection
    keys = [connection.fence(1) for _ in range(20)]
    assert all(one != other for one, other in itertools.pairwise(keys))
    assert connection.counters.get("landing_fenced") == 20


def test_a_key_that_can_not_be_revoked_stops_the_queue_pair_and_ends_the_link(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot must not be granted again while the old key may work: through a queue pair in error it does not."""
    connection = link(pair.right).connection

    def refuses(_region: Any) -> None:
        raise PeerFault(Reason.LINK_ERROR, "no")

    monkeypatch.setattr(connection.domain, "revoke", refuses)
    pair.right.link.fence(1)
    assert connection.phase is Phase.FAILED
    assert connection.pair.state == "ERR"
    assert pair.right.link.pump(0) == -Reason.LINK_ERROR.code
    before = bytes(connection.landing.view)
    pair.left.frame(1, noise(1, 20_000), slot=1)
    for _ in range(50):
        pair.left.link.pump(0)
    assert bytes(connection.landing.view) == before


# ---- what is left behind ------------------------------------------------------------------------------------------------


def test_a_hundred_queue_pairs_of_one_link_leave_one_behind(pair: Pair) -> None:
    before, descriptors = dict(alive), len(os.listdir("/proc/self/fd"))
    for number in range(100):
        pair.left.frame(number, noise(number, 5000), slot=number % 2)
        pair.left.frame(number, kind=wire.CLOSE)
        until(lambda n=number: len(taken(pair)) >= 2 * n + 2, pair.left, pair.right)  # type: ignore[misc]
        pair.right.link.fence(number % 2)
        life = link(pair.left).connection.life
        link(pair.left).connection.pair.fail()
        until(lambda n=life: all(link(end).connection.life > n and link(end).connection.up for end in (pair.left, pair.right)),
              pair.left, pair.right)  # type: ignore[misc]  # fmt: skip
    assert alive == before
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert link(pair.left).rows_lost == 0


def test_a_hundred_links_leave_nothing_behind() -> None:
    make_rdma_once = cycle()
    before, descriptors = dict(alive), len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        make_rdma_once()
    assert alive == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def cycle() -> Callable[[], None]:
    """One link each call, with a row that is not taken and a fence, over one device that stays open."""
    first = make_rdma()
    device = link(first.left).connection.device
    for end in (first.left, first.right):
        end.link.close()

    def once() -> None:
        near, far = socket.socketpair()
        both = [RdmaConnection(sock, device, NO_LANDING, link(first.left).connection.counters) for sock in (near, far)]
        for end in both:
            end.begin(0)
        while not all(end.up for end in both):
            for end in both:
                if not end.up:
                    end.poll(0)
        both[0].fail()
        for end in both:
            end.close()
            end.close()

    return once


def test_a_device_takes_what_was_made_in_it_along(real: Pair) -> None:
    """Whatever goes first: what pyverbs has freed is never used again."""
    device = link(real.left).connection.device
    before = [link(end).connection.pair for end in (real.left, real.right)]
    device.close()
    assert [pair.state for pair in before] == ["CLOSED", "CLOSED"]
    with pytest.raises(LocalMisuse):
        real.left.link.pump(0)


def test_a_queue_pair_that_is_closed_is_used_by_nobody(pair: Pair) -> None:
    queue_pair = link(pair.left).connection.pair
    pair.left.link.close()
    uses: list[Callable[[], object]] = [
        lambda: queue_pair.received(1), lambda: queue_pair.finished(1), queue_pair.arm, queue_pair.fail, queue_pair.take_event
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(LocalMisuse, match="after its end"):
            use()


# ---- one process --------------------------------------------------------------------------------------------------------


def test_a_forked_child_is_refused_and_the_parent_goes_on(real: Pair) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = b"nothing"
        try:
            real.left.link.pump(0)
        except LocalMisuse as error:
            said = str(error).encode()
        finally:
            real.left.link.close()
            os.write(writer, said)
            os._exit(0)
    os.close(writer)
    words = os.read(reader, 4096)
    os.close(reader)
    os.waitpid(child, 0)
    assert b"forked child" in words
    real.left.frame(1, noise(1, 20_000), slot=1)
    until(lambda: taken(real) == [1], real.left, real.right)
    assert link(real.left).connection.pair.state == "RTS"


# ---- sleeping -----------------------------------------------------------------------------------------------------------


def test_a_sleeper_is_woken_by_a_message_and_by_a_death(pair: Pair) -> None:
    poller = select.poll()
    for descriptor, events in pair.right.link.watch():
        poller.register(descriptor, events)
    assert pair.right.link.rest() == 1
    assert poller.poll(0) == []
    pair.left.frame(1, kind=wire.CLOSE)
    pair.left.link.pump(0)
    assert poller.poll(60_000)
    pair.right.link.rise(True)
    until(lambda: taken(pair) == [1], pair.left, pair.right)
    while pair.right.link.rest() < 0:
        pair.right.link.pump(0)
    pair.left.link.close()
    assert poller.poll(60_000)
    pair.right.link.rise(True)
    assert ending(pair.right) is Reason.PEER_LOST


def test_what_arrived_before_the_sleep_is_found(pair: Pair) -> None:
    pair.left.frame(1, kind=wire.CLOSE)
    pair.left.link.pump(0)
    while link(pair.left).connection.pair.unfinished:
        pair.left.link.pump(0)
    assert pair.right.link.rest() == -1
    pair.right.link.pump(0)
    assert taken(pair) == [1]


# ---- devices ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "named"),
    (
        ({"device": "nothing0"}, "no rdma device nothing0; there are "),
        ({"port": 9}, "port 9"),
        ({"gid_index": 200}, "gid_index 200 is empty"),
    ),
)
def test_what_a_device_has_not_is_one_line(real: Pair, settings: dict[str, Any], named: str) -> None:
    name = link(real.left).connection.device.name
    before = dict(alive)
    with pytest.raises(ConfigError, match=named) as caught:
        Device(RdmaConfig(**{"device": name, **settings}))
    assert "\n" not in str(caught.value)
    assert alive == before


def test_a_link_says_its_device_gid_and_mtu(pair: Pair) -> None:
    said = pair.left.link.describe()
    assert said["device"] == link(pair.left).connection.device.name
    assert said["gid_kind"] == "RoCE v2"
    assert said["mtu"] in (1024, 4096, 2048, 512, 256)
    assert said["queue_depth"] == 16
    assert said["queue_pair"] == pair.right.link.describe()["peer_queue_pair"]
