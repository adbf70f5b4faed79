"""Which connections of a control listener became peers, which failed, and which ended.

Between libzmq's socket monitor and `control`'s listener. Does no I/O; takes events and senders, answers with peers.
"""

from __future__ import annotations

from typing import Final

import zmq

from .counters import Counters
from .errors import Reason

ACCEPTED: Final = int(zmq.EVENT_ACCEPTED)
DISCONNECTED: Final = int(zmq.EVENT_DISCONNECTED)
SUCCEEDED: Final = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
FAILED: Final = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
FAILED_PROTOCOL: Final = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
FAILED_AUTH: Final = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)


class Connections:
    """Which connections of a listener became peers and which failed, from the monitor's events and the messages seen.

    libzmq names the descriptor when a connection is accepted and when it ends, but not when its handshake succeeds; the
    first message tells which peer it is. A connection that ends unseen is a failed handshake unless a success is owed.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._open: set[int] = set()
        self._ending: list[bytes] = []
        self._peer_of: dict[int, bytes] = {}
        self._peers: set[bytes] = set()
        self._silent = 0  # handshakes that succeeded and have not sent a message yet
        self._failing = 0  # handshakes reported as failed, whose connection has not ended yet

    def __len__(self) -> int:
        return len(self._peers) + self._silent

    def event(self, event: int, descriptor: int) -> None:
        """Takes one monitor event; `descriptor` is read for accepted and disconnected alone."""
        if event == ACCEPTED:
            self._open.add(descriptor)
        elif event == SUCCEEDED:
            self._silent += 1
        elif event in (FAILED, FAILED_PROTOCOL, FAILED_AUTH):
            self._failing += 1
            self._counters.add("control_handshake_failed")
            if event == FAILED_AUTH:
                self._counters.add("control_auth_failed")
                self._counters.refuse(Reason.AUTH_FAILED)
        elif event == DISCONNECTED:
            self._open.discard(descriptor)
            if descriptor in self._peer_of:
                self._lose(descriptor)
            elif self._failing:
                self._failing -= 1
            elif self._silent:
                self._silent -= 1
            else:
                self._counters.add("control_handshake_failed")

    def seen(self, peer: bytes, descriptor: int, most: int) -> bool:
        """Takes the sender of a message; False when `most` peers are known already and this is another."""
        if peer in self._peers:
            return True
        if len(self._peers) >= most:
            return False
        gone = descriptor not in self._open  # it spoke and went before we looked: its success is accounted for
        if descriptor in self._peer_of:  # two spoke on one number before we looked, and the first one is the one gone
            self._lose(descriptor)
        elif self._silent and not gone:
            self._silent -= 1
        elif not gone:  # an unseen connection that ended was taken for this peer's success: it was a failure
            self._counters.add("control_handshake_failed")
        self._peers.add(peer)
        self._peer_of[descriptor] = peer
        if gone:
            self._lose(descriptor)
        return True

    def drained(self) -> list[bytes]:
        """The peers that are gone, asked once every message that arrived has been seen: none of theirs can follow."""
        gone, self._ending = self._ending, []
        self._peers.difference_update(gone)
        return gone

    def _lose(self, descriptor: int) -> None:
        self._ending.append(self._peer_of.pop(descriptor))
