"""Verbs that are played, for the link's own logic where there is no device: memory is copied at once, keys and states are kept.

What real devices do is tested on real ones (tests/rdma, test_rdma_link). Played strictly: a message that meets no receive, or
memory that is not registered, fails the test at once.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from pp1q_transport.errors import LocalMisuse
from pp1q_transport.links.rdma_config import ROCE_V2, Gid, RdmaConfig
from pp1q_transport.links.rdma_device import PortFacts
from pp1q_transport.links.rdma_records import Join

ROW = 129
FLUSHED, REFUSED, UNREACHED = 5, 10, 12
_numbers = itertools.count(100)
_keys = itertools.count(1000)
_pairs: dict[int, PlayedPair] = {}


@dataclass
class Completion:
    status: int
    wr_id: int = 0
    byte_len: int = 0
    opcode: int = 128
    imm_data: int = 0
    vendor_err: int = 0


@dataclass
class Region:
    address: int
    length: int
    lkey: int
    rkey: int
    remote: bool
    keep: object
    thing: object = None


class PlayedDevice:
    """A device of which there is always one. `gids`: its table."""

    def __init__(self, **settings: Any) -> None:
        self.config = RdmaConfig(**settings)
        self.name = "played0"
        self.port = PortFacts(1024, True, 0)
        self.entry = Gid(1, "0000:0000:0000:0000:0000:ffff:0a00:0001", ROCE_V2, "played")
        self.domains: list[PlayedDomain] = []
        self.happened: list[int] = []

    @property
    def mtu(self) -> int:
        return self.port.mtu if self.config.mtu == "auto" else int(self.config.mtu)

    def gid(self, near: str) -> Gid:
        return self.entry

    def events(self) -> list[int]:
        found, self.happened = self.happened, []
        return found

    def domain(self) -> PlayedDomain:
        self.domains.append(PlayedDomain(self))
        return self.domains[-1]

    def describe(self) -> dict[str, object]:
        return {"device": self.name, "port": self.config.port, "link_layer": "Ethernet", "port_mtu": self.port.mtu}

    def close(self) -> None:
        assert all(domain.closed for domain in self.domains)


class PlayedDomain:
    """Keys and memory. `refuses`: whether it would not let go of a region."""

    foreign = False

    def __init__(self, device: PlayedDevice) -> None:
        self.device = device
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.regions: dict[int, Region] = {}
        self.pairs: list[PlayedPair] = []
        self.refuses: Exception | None = None
        self.closed = False

    def register(self, address: int, length: int, keep: object, writable: bool = False, remote: bool = False) -> Region:
        key = next(_keys)
        region = self.regions[key] = Region(address, length, key, key, remote, keep)
        return region

    def revoke(self, region: Region) -> None:
        if self.refuses is not None:
            raise self.refuses
        del self.regions[region.rkey]

    def reaches(self, key: int, address: int, length: int, remote: bool) -> bool:
        region = self.regions.get(key)
        if region is None or (remote and not region.remote):
            return False
        return region.address <= address and address + length <= region.address + region.length

    def queue_pair(self, receives: int, sends: int, remote_write: bool) -> PlayedPair:
        self.pairs.append(PlayedPair(self, receives, sends))
        return self.pairs[-1]

    def close(self) -> None:
        if not self.closed:
            assert all(pair.closed for pair in self.pairs), "a protection domain that goes before its queue pairs"
            self.closed = True
            self.regions.clear()
            os.close(self.fd)


@dataclass
class _Work:
    pieces: list[tuple[int, int, int]]
    remote: tuple[int, int, int] | None = None
    data: bytes = field(default=b"")


class PlayedPair:
    """A queue pair: what is posted is carried over at once when the peer's can receive."""

    row_received = ROW
    inline_bytes = 0

    def __init__(self, domain: PlayedDomain, receives: int, sends: int) -> None:
        self.domain = domain
        self.number = next(_numbers)
        self.psn = self.number * 7
        self.receives, self.sends = receives, sends
        self.state = "INIT"
        self.closed = False
        self.peer = 0
        self._posted: deque[tuple[int, int, int]] = deque()
        self._received: deque[Completion] = deque()
        self._finished: deque[Completion] = deque()
        self._waiting: deque[_Work] = deque()
        self._armed = False
        self.unfinished = 0
        _pairs[self.number] = self

    def _check(self) -> None:
        if self.closed:
            raise LocalMisuse("a played queue pair after its end")

    def connect(self, ours: Join, theirs: Join, gid_index: int) -> None:
        self._check()
        assert (ours.number, ours.psn) == (self.number, self.psn)
        self.peer, self.state = theirs.number, "RTS"
        other = _pairs.get(self.peer)
        if other is not None:
            other._carry()

    def post_receive(self, number: int, address: int, length: int, lkey: int) -> None:
        self._check()
        assert self.domain.reaches(lkey, address, length, False)
        if self.state == "ERR":
            self._arrives(Completion(FLUSHED, number))
            return
        self._posted.append((number, address, length))
        assert len(self._posted) <= self.receives

    def post_send(self, pieces: list[tuple[int, int, int]]) -> None:
        self._post(_Work(pieces))

    def post_row(self, pieces: list[tuple[int, int, int]], address: int, rkey: int, immediate: int) -> None:
        self._post(_Work(pieces, (address, rkey, immediate)))

    def _post(self, work: _Work) -> None:
        self._check()
        for address, length, key in work.pieces:
            assert self.domain.reaches(key, address, length, False), "a send from memory that is not registered"
        self.unfinished += 1
        assert self.unfinished <= self.sends, "a send queue is full"
        self._waiting.append(work)
        self._carry()

    def _carry(self) -> None:
        """Everything posted goes over, in order, unless the peer's end is not there yet."""
        while self._waiting and not self.closed:
            if self.state == "ERR":
                self._waiting.popleft()
                self._finished.append(Completion(FLUSHED))
                continue
            other = _pairs.get(self.peer)
            if other is not None and other.state == "INIT":
                return
            work = self._waiting.popleft()
            status = UNREACHED if other is None or other.closed or other.state == "ERR" else other._lands(work)
            self._finished.append(Completion(status))
            if status:
                if status == REFUSED and other is not None:
                    other.domain.device.happened.append(3)
                    other.fail()
                self.fail()

    def _lands(self, work: _Work) -> int:
        data = b"".join(ctypes.string_at(address, length) for address, length, _key in work.pieces)
        if work.remote is not None:
            address, key, immediate = work.remote
            if not self.domain.reaches(key, address, len(data), True):
                return REFUSED
            ctypes.memmove(address, data, len(data))
        assert self._posted, "a receive queue ran dry"
        number, at, room = self._posted.popleft()
        if work.remote is None:
            assert len(data) <= room, "a message larger than a receive"
            ctypes.memmove(at, data, len(data))
            self._arrives(Completion(0, number, len(data)))
        else:
            self._arrives(Completion(0, number, len(data), ROW, immediate))
        return 0

    def _arrives(self, completion: Completion) -> None:
        self._received.append(completion)
        if self._armed:
            self._armed = False
            os.eventfd_write(self.domain.fd, 1)

    def received(self, most: int) -> list[Completion]:
        self._check()
        return [self._received.popleft() for _ in range(min(most, len(self._received)))]

    def finished(self, most: int) -> list[Completion]:
        self._check()
        done = [self._finished.popleft() for _ in range(min(most, len(self._finished)))]
        self.unfinished -= len(done)
        return done

    def arm(self) -> None:
        self._check()
        self._armed = True

    def take_event(self) -> None:
        self._check()
        try:
            os.eventfd_read(self.domain.fd)
        except BlockingIOError:
            return

    def fail(self) -> None:
        self._check()
        if self.state == "ERR":
            return
        self.state = "ERR"
        while self._posted:
            self._arrives(Completion(FLUSHED, self._posted.popleft()[0]))
        self._carry()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.state = "CLOSED"
            _pairs.pop(self.number, None)
