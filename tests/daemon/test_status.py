"""Asking a daemon: what travels comes back, and whatever else answers is a named fault."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pp1q_transport.daemon.status import (
    ANSWER,
    ATTACH,
    STATUS_BYTES_AT_MOST,
    Status,
    encode_status,
    fetch_status,
    parse_status,
)
from pp1q_transport.errors import PeerFault, Reason

pytestmark = pytest.mark.timeout(30)


@contextmanager
def server(path: Path, reply: Callable[[bytes], bytes | None]) -> Iterator[list[bytes]]:
    """A daemon that answers one status connection after another with `reply(request)`; None: it never answers."""
    asked: list[bytes] = []
    held: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            while True:
                try:
                    link, _ = listener.accept()
                except OSError:
                    return
                asked.append(link.recv(4096))
                data = reply(asked[-1])
                held.append(link)
                if data is not None:
                    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 21)
                    if data:
                        link.send(data)
                    link.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield asked
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for link in held:
                link.close()
            path.unlink()


def test_what_a_daemon_says_arrives(tmp_path: Path, make_status: Callable[..., Status]) -> None:
    status = make_status()
    with server(tmp_path / "s", lambda _: encode_status(status)) as asked:
        assert fetch_status(tmp_path / "s") == status
    assert asked == [b"PP1A" + bytes((1, 0, 3, 0)) + bytes(8)]
    assert ATTACH.size == 16


REFUSALS = (
    (lambda _: b"", Reason.PEER_LOST, "without an answer"),
    (lambda _: None, Reason.TIMEOUT, "did not answer"),
    (lambda _: ANSWER.pack(b"PP1A", 1, Reason.AUTH_FAILED.code, 7) + bytes(180) + b"not\x1byou", Reason.AUTH_FAILED, r"not\?you"),
    (lambda _: ANSWER.pack(b"PP1A", 1, Reason.OVERLOAD.code, 900), Reason.OVERLOAD, "refuses to tell"),
    (lambda _: ANSWER.pack(b"PP1A", 2, Reason.OVERLOAD.code, 0), Reason.BAD_VERSION, "version 2"),
    (lambda _: ANSWER.pack(b"PP1A", 1, 0, 0), Reason.MALFORMED, "verdict 0"),
    (lambda _: b"PP1A", Reason.MALFORMED, "cut short"),
    (lambda _: b"{}", Reason.MALFORMED, "status.role"),
    (lambda _: b"[" * 100_000, Reason.MALFORMED, "not JSON"),
    (lambda _: b"\xff", Reason.MALFORMED, "not JSON"),
    (lambda _: b" " * (STATUS_BYTES_AT_MOST + 1), Reason.MALFORMED, "larger than"),
)


@pytest.mark.parametrize(("reply", "reason", "text"), REFUSALS, ids=[text for _, _, text in REFUSALS[:-1]] + ["large"])
def test_other_answers_are_faults(tmp_path: Path, reply: Callable[[bytes], bytes | None], reason: Reason, text: str) -> None:
    with server(tmp_path / "s", reply), pytest.raises(PeerFault, match=text) as caught:
        fetch_status(tmp_path / "s", 0.3)
    assert caught.value.reason is reason


def test_a_refusal_before_a_byte_was_read_is_heard(tmp_path: Path) -> None:
    """The daemon judges the uid and closes while our request lies unread: the kernel reports a reset first."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()

        def refuse() -> None:
            link, _ = listener.accept()
            while not select.select([link], [], [], 0.01)[0]:
                pass
            link.send(ANSWER.pack(b"PP1A", 1, Reason.AUTH_FAILED.code, 0))
            link.close()

        thread = threading.Thread(target=refuse)
        thread.start()
        with pytest.raises(PeerFault, match="refuses to tell") as caught:
            fetch_status(tmp_path / "s")
        thread.join()
    assert caught.value.reason is Reason.AUTH_FAILED


def test_a_refusal_before_we_spoke_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon closes before our request is sent, which then breaks the pipe."""
    closed = threading.Event()

    class Late(socket.socket):
        def sendall(self, *arguments: object) -> None:
            assert closed.wait(10)
            super().sendall(*arguments)  # type: ignore[arg-type]

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()

        def refuse() -> None:
            link, _ = listener.accept()
            link.send(ANSWER.pack(b"PP1A", 1, Reason.AUTH_FAILED.code, 0))
            link.close()
            closed.set()

        thread = threading.Thread(target=refuse)
        thread.start()
        monkeypatch.setattr("pp1q_transport.daemon.status.socket.socket", Late)
        with pytest.raises(PeerFault, match="refuses to tell"):
            fetch_status(tmp_path / "s")
        thread.join()


@pytest.mark.parametrize("path", ("nothing", "x" * 200, "", "file"))
def test_nobody_there_is_peer_lost(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PeerFault) as caught:
        fetch_status(str(tmp_path / path) if path else "")
    assert caught.value.reason is Reason.PEER_LOST


def _paths(value: object, path: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _paths(item, (*path, key))


@pytest.mark.parametrize("wrong", (None, True, "x", -1.5, [], {}, float("nan")), ids=repr)
def test_every_part_is_judged(make_status: Callable[..., Status], wrong: object) -> None:
    """Each part replaced by something else is refused, but where the shape allows that very thing."""
    allowed = {
        "None": {("group",)},
        "True": {("draining",), ("sessions", 0, "up"), ("group", "open")},
        "-1.5": {("uptime_s",), ("sessions", 0, "since_s"), ("clients", 0, "since_s"), ("last_loop_age_s",)},
        "[]": {("sessions",), ("clients",), ("breakers",)},
        "{}": {("slots",), ("totals",), ("reasons",), ("discards",)},
    }
    passed = set()
    texts = set()
    for path in _paths(make_status()):
        status = json.loads(encode_status(make_status()))
        part = status
        for key in path[:-1]:
            part = part[key]
        texts |= {path} if isinstance(part[path[-1]], str) else set()
        part[path[-1]] = wrong
        with contextlib.suppress(PeerFault):
            parse_status(json.dumps(status).encode())
            passed.add(path)
    assert passed == (texts if wrong == "x" else allowed.get(repr(wrong), set()))


@pytest.mark.parametrize("change", (("bounds_ns", [2, 1]), ("bounds_ns", []), ("counts", [1]), ("counts", [-1] * 72)))
def test_a_histogram_must_be_one(make_status: Callable[..., Status], change: tuple[str, list[int]]) -> None:
    status = make_status()
    status["latency"][change[0]] = change[1]  # type: ignore[literal-required]
    with pytest.raises(PeerFault, match=r"status\.latency"):
        parse_status(json.dumps(status).encode())


@pytest.mark.parametrize("key", ("discards", "later"))
def test_optional_and_later_keys_do_no_harm(make_status: Callable[..., Status], key: str) -> None:
    status = dict(make_status(later={"x": 1}))
    status.pop(key)
    assert parse_status(json.dumps(status).encode()) == status


def test_a_status_too_large_to_arrive_is_not_sent(make_status: Callable[..., Status]) -> None:
    with pytest.raises(ValueError, match="allowed"):
        encode_status(make_status(name="x" * STATUS_BYTES_AT_MOST))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
)


@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_parsing_raises_one_error_only(data: bytes) -> None:
    with pytest.raises(PeerFault):
        parse_status(data)
