"""What the two ends of a benchmark say to each other over the control plane, checked key by key.

Between `leading` and `measuring`, and the client, which carries the maps. Keeps no state. SPEC section 9.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from ..errors import PeerFault, Reason
from .floor_plan import FloorAddress

ANSWER_S: Final = 30.0  # for a message that the other end sends as soon as it can
_TEXT_CHARS: Final = 300

NOT_PINNED: Final = -1

OPTIONS: Final[dict[str, tuple[type, ...]]] = {"plan": (dict,), "boot_id": (str,), "cpu": (int,)}
ACCEPTED: Final[dict[str, tuple[type, ...]]] = {"boot_id": (str,), "cpu": (int,), "floors": (list,)}
BEGIN: Final[dict[str, tuple[type, ...]]] = {"begin": (bool,), "cpu": (int,)}
SERVED: Final[dict[str, tuple[type, ...]]] = {"stage": (int,), "cpu_s": (int, float), "staged_ns": (bytes,)}
WANT: Final[dict[str, tuple[type, ...]]] = {"samples_from": (int,)}
SAMPLES: Final[dict[str, tuple[type, ...]]] = {"from": (int,), "ns": (bytes,)}
SAMPLES_A_MESSAGE: Final = 2000  # u64 each; a byte string of a control message holds 16 KiB


def checked(body: object, types: Mapping[str, tuple[type, ...]], name: str) -> dict[str, object]:
    """`body` if it is a map of exactly these keys and types (a bool is no number).

    Raises `PeerFault`: what the peer reports, if it reports an error, else `malformed`.
    """
    if isinstance(body, dict) and body.keys() == {"error"} and isinstance(body["error"], str):
        text = body["error"][:_TEXT_CHARS]
        raise PeerFault(Reason.CANCELLED, f"the other end says: {text if text.isprintable() else ascii(text)}")
    if not isinstance(body, dict) or body.keys() != types.keys():
        raise PeerFault(Reason.MALFORMED, f"{name}: expected a map of {sorted(types)}")
    for key, allowed in types.items():
        if type(body[key]) not in allowed:
            raise PeerFault(Reason.MALFORMED, f"{name}: {key} is of type {type(body[key]).__name__}")
    return body


def floor_address(value: object) -> FloorAddress | None:
    """Where the peer's floors listen; None for an empty list. Raises `PeerFault(malformed)`."""
    if value == []:
        return None
    if isinstance(value, list) and [type(item) for item in value] == [str, int, int, str]:
        address = FloorAddress(*value)
        if 0 < address.tcp_port < 1 << 16 and 0 < address.zmq_port < 1 << 16 and len(address.token) == 32:
            return address
    raise PeerFault(Reason.MALFORMED, "the floors' address is no [host, port, port, token]")


@contextmanager
def quiet_gc() -> Iterator[None]:
    """No garbage collection inside: a full one takes milliseconds. What lives now is never looked at again until the end."""
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()
