"""How a measured loop waits for its link: by polling it or by sleeping in the kernel, as the plan says.

Between the hot loops of `leading` and `measuring` and one link, which they drive themselves: the engine's own loop looks at
the control plane as well, and is called only when nothing has moved for a while. Decides nothing. SPEC section 9.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from .._native.kernels import monotonic_ns
from ..errors import PeerFault, Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..client.endpoint import Endpoint
    from ..links.stream import StreamLink

SPIN_TRIES: Final = 4_000  # about a millisecond of polling before anything else gets a look
BLOCK_NS: Final = 20_000_000


def advance_of(link: StreamLink, idle: str) -> Callable[[], int]:
    """A call that waits for bytes to move and moves them: how many, 0 when none did for a while, negative for a lost link."""
    if idle == "spin":
        return partial(link.pump_until, SPIN_TRIES)

    wait, pump = link.wait, link.pump

    def sleep_and_pump() -> int:
        wait(BLOCK_NS, -1)
        return pump(monotonic_ns())

    return sleep_and_pump


def live_link(end: Endpoint) -> StreamLink:
    """The link of the running session. Raises `PeerFault(peer_lost)` when there is none."""
    link = end.engine.link
    if link is None:
        raise PeerFault(Reason.PEER_LOST, "the other end left before the run was over")
    return link


def lost_link(end: Endpoint, moved: int) -> PeerFault:
    """After a link answered `-code`: lets the engine end the session, and says what to raise."""
    end.engine.poll()
    return PeerFault(Reason.from_code(-moved), "the other end is gone in the middle of the run")


def await_message(end: Endpoint, kind: str, timeout_s: float) -> object:
    """The next control message of `kind`. Raises `PeerFault`: `timeout`, or `peer_lost` when the session ends first."""
    deadline_ns = monotonic_ns() + int(timeout_s * 1e9)
    engine = end.engine
    while True:
        for index, (got, body) in enumerate(engine.inbox):
            if got == kind:
                del engine.inbox[index]
                return body
        live_link(end)
        if monotonic_ns() >= deadline_ns:
            raise PeerFault(Reason.TIMEOUT, f"the other end sent no {kind} within {timeout_s:g} s")
        engine.poll()
        engine.wait(2_000_000)


def look_around(end: Endpoint) -> None:
    """Nothing moved for a while: the control plane and the session's end. Raises `PeerFault` when the peer left or complains."""
    end.engine.poll()
    live_link(end)
    for _kind, body in end.engine.inbox:
        if isinstance(body, dict) and body.keys() == {"error"}:
            raise PeerFault(Reason.CANCELLED, f"the other end says: {ascii(body['error'])[:300]}")
