"""What `pp1q daemon --check` says of a configuration: the examples', line by line, and the slot memory of every mode."""

from __future__ import annotations

from pathlib import Path

import pytest

from pp1q_transport.daemon.config import parse
from pp1q_transport.daemon.meaning import meaning, slot_bytes

EXAMPLES = Path(__file__).resolve().parents[2] / "deploy" / "examples"
SESSION = "[session]\nvocab_size = 1024\ndepth = 1\nmax_slots = 8\nrepresentations = ['dense']\n"
WHOLE = 8 * (4 * 1024 + 64)  # slots of one row and its metadata

MEANINGS = {
    "local-receiver.toml": (
        "/tmp/pp1q-receiver.sock, mode 0o600, for uid ",
        "8 slots take 20.7 MB: depth 5, vocabulary 129280, dense and sparse",
        "leader: listens on tcp://127.0.0.1:7801 without keys, tcp link",
        "metrics  off",
        "breaker  opens after 8 discards in a row within 60 s, probes after 1 s",
    ),
    "leader.toml": (
        "role     leader leader, idle spin-then-block, log level info",
        "socket   /run/pp1q-leader/leader.sock, mode 0o660, for uid 1000",
        "peer     target-a: connects to tcp://receiver0.example:7801 with keys, tcp link, replicate group of 2",
        "metrics  http://127.0.0.1:9109/metrics",
    ),
    "receiver-rank1.toml": ("group    rank 1 of 2, replicate, connects to tcp://receiver0.example:7802 with keys",),
}


@pytest.mark.parametrize("name", sorted(MEANINGS))
def test_a_few_lines_say_what_an_example_means(name: str) -> None:
    lines = meaning(parse((EXAMPLES / name).read_text(encoding="utf-8"), name))
    shown = "\n".join(lines)
    for words in MEANINGS[name]:
        assert words in shown
    assert len(lines) <= 7
    assert ("breaker" in shown) == (name == "local-receiver.toml")  # only there is it asked


def leader(*peers: str) -> str:
    text = "[daemon]\nrole = 'leader'\nsocket = '/tmp/a'\n" + SESSION
    for number, peer in enumerate(peers):
        text += f"[[peer]]\nname = 'p{number}'\nconnect = 'tcp://127.0.0.1:{7801 + number}'\n{peer}\n"
    return text


def split(rank: int) -> str:
    return f"group = 'g'\ngroup_size = 2\ngroup_rank = {rank}\ngroup_mode = 'vocabulary'"


def rank(number: int, mode: str) -> str:
    way = "connect" if number else "listen"
    peer = "[[peer]]\nname = 'l'\nlisten = 'tcp://127.0.0.1:0'\n" if not number or mode != "replicate" else ""
    group = f"[group]\nsize = 2\nrank = {number}\nmode = '{mode}'\n{way} = 'tcp://127.0.0.1:7900'\n"
    return "[daemon]\nrole = 'receiver'\nsocket = '/tmp/a'\n" + SESSION + peer + group


@pytest.mark.parametrize(
    ("text", "expected"),
    (
        (leader(""), WHOLE),
        (leader("", ""), 2 * WHOLE),
        (leader(split(0), split(1)), WHOLE),  # one target, whole rows
        (rank(0, "replicate"), WHOLE),
        (rank(1, "replicate"), WHOLE),
        (rank(1, "vocabulary"), 8 * (4 * 512 + 64)),
        (rank(0, "request-owner"), WHOLE),
    ),
)
def test_the_slot_memory_is_all_that_a_daemon_takes(text: str, expected: int) -> None:
    assert slot_bytes(parse(text, "f")) == expected


def test_a_breaker_that_is_off_is_said_to_be() -> None:
    assert "  breaker  off" in meaning(parse(rank(0, "replicate") + "[breaker]\nenabled = false\n", "f"))


def test_the_settings_of_an_rdma_link_are_said() -> None:
    text = leader("link = 'rdma'")
    found = [line for line in meaning(parse(text + "[rdma]\ntimeout = 18\n", "f")) if line.startswith("  rdma ")]
    assert len(found) == 1
    assert "device auto" in found[0]
    assert "timeout 18" in found[0]
