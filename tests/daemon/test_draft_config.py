"""[draft] in a leader's file: what is right, in words, and each thing that is wrong as one line that names its key."""

from __future__ import annotations

from pathlib import Path

import pytest

from pp1q_transport.daemon.config import parse
from pp1q_transport.daemon.meaning import meaning
from pp1q_transport.errors import ConfigError
from pp1q_transport.session.hello import Role, check

LEADER = '[daemon]\nrole = "leader"\nsocket = "/run/pp1q/draft.sock"\n'
TARGET = '[[peer]]\nname = "a"\nlisten = "tcp://127.0.0.1:7801"\n'
OTHER = '[[peer]]\nname = "b"\nlisten = "tcp://127.0.0.1:7802"\n'
ZERO = '[draft]\nsize = 2\nlisten = "tcp://127.0.0.1:7900"\n'
ONE = '[draft]\nsize = 2\nrank = 1\nconnect = "tcp://127.0.0.1:7900"\n'
FOLLOWS = ONE + 'targets = ["a"]\n'


def shard(rank: int, size: int = 2, mode: str = "vocabulary", group: str = "g") -> str:
    return (
        f'[[peer]]\nname = "{group}{rank}"\nlisten = "tcp://127.0.0.1:781{rank}"\ngroup = "{group}"\n'
        f'group_mode = "{mode}"\ngroup_size = {size}\ngroup_rank = {rank}\n'
    )


@pytest.mark.parametrize(
    ("text", "words", "shards"),
    (
        (LEADER + TARGET + ZERO, "rank 0 of 2, draws for a, listens on tcp://127.0.0.1:7900 without keys", False),
        (LEADER + FOLLOWS, "rank 1 of 2, follows a, connects to tcp://127.0.0.1:7900 without keys", False),
        (LEADER + TARGET + OTHER + ZERO, "rank 0 of 2, draws for a, b, listens", False),
        (LEADER + shard(0) + ZERO, "rank 0 of 2, sends its own range to g, listens", True),
        (LEADER + shard(1) + ONE, "rank 1 of 2, sends its own range to g, connects", True),
        (LEADER + shard(0) + shard(1) + ZERO, "rank 0 of 2, draws for g, listens", False),
        (LEADER + shard(0, mode="request-owner") + shard(1, mode="request-owner") + ZERO, "draws for g0, g1, listens", False),
    ),
)
def test_a_draft_of_ranks_in_words(text: str, words: str, shards: bool) -> None:
    config = parse(text, "leader.toml")
    assert any(line.split(maxsplit=1)[0] == "draft" and words in line for line in meaning(config)), meaning(config)
    assert config.draft_shards is shards
    role = Role.DRAFT_PEER if config.draft.rank else Role.DRAFT_LEADER
    assert config.draft_hello(1, config.target_names()[0]).role is role


def test_a_draft_of_one_is_not_mentioned() -> None:
    config = parse(LEADER + TARGET, "leader.toml")
    assert (config.draft.size, config.draft_shards) == (1, False)
    assert not any(line.strip().startswith("draft") for line in meaning(config))


def test_both_ends_of_a_link_agree_about_target_and_rank() -> None:
    ours = parse(LEADER + TARGET + ZERO, "leader.toml").draft_hello(1, "a")
    theirs = parse(LEADER + FOLLOWS, "peer.toml").draft_hello(2, "a")
    assert (ours.target_identity, theirs.rank) == (theirs.target_identity, 1)
    from dataclasses import replace

    check(ours, replace(theirs, link_nonce=bytes([1] * 16)))


@pytest.mark.parametrize(
    ("text", "error"),
    (
        (LEADER + TARGET + "[draft]\nsize = 9\n", "[draft] size must be an integer in 1..8, not 9"),
        (LEADER + TARGET + "[draft]\nsize = 2\nrank = 2\n", "[draft] rank must be an integer in 0..1, not 2"),
        (LEADER + TARGET + "[draft]\nsize = 2\n", "[draft] listen is missing"),
        (LEADER + TARGET + "[draft]\nsize = 2\nrank = 1\n", "[draft] connect is missing"),
        (LEADER + TARGET + ZERO.replace("size = 2", "size = 1"), "[draft] listen is not allowed: a draft of one has nobody"),
        (LEADER + TARGET + ZERO.replace("listen", "connect"), "[draft] rank is missing"),
        (LEADER + TARGET + ZERO.replace("listen", "rank = 0\nconnect"), "[draft] connect is not allowed: rank 0 listens for the"),
        (LEADER + FOLLOWS.replace("connect", "listen"), "[draft] listen is not allowed: ranks above 0 connect to rank 0"),
        (LEADER + TARGET + ZERO + 'server = "x"\n', "[draft] server is not allowed: only a rank that connects needs it"),
        (LEADER + TARGET + ZERO + 'targets = ["a"]\n', "[draft] targets is not allowed: those of rank 0 are its [[peer]]"),
        (LEADER + ONE, "[draft] targets is missing: it names the targets of draft rank 0"),
        (LEADER + ONE + 'targets = ["a", 3]\n', "[draft] targets must be a list of names"),
        (LEADER + ONE + "targets = []\n", "[draft] targets must be a list of 1..16 names"),
        (LEADER + ONE + 'targets = ["a", "a"]\n', "[draft] targets must be a list of names of rank 0's targets, none twice"),
        (LEADER + TARGET + ZERO + "ranks = 1\n", "[draft] has no key 'ranks'"),
        (LEADER + ZERO, "a leader needs 1..16 [[peer]], there is none"),
        (LEADER + shard(1) + FOLLOWS, "[draft] targets is not allowed with [[peer]]"),
        (LEADER + TARGET + FOLLOWS, '[[peer]] "a" must have group_mode "vocabulary", group_size 2 and group_rank 1'),
        (LEADER + shard(0) + ONE, '[[peer]] "g0" must have group_mode "vocabulary", group_size 2 and group_rank 1'),
        (LEADER + shard(1, size=3) + ONE, '[[peer]] "g1" must have group_mode "vocabulary", group_size 2 and group_rank 1'),
        (LEADER + shard(0, size=3) + ZERO, 'group "g" needs a [[peer]] for each group_rank 0..2, not 0'),
        (LEADER + shard(0), 'group "g" needs a [[peer]] for each group_rank 0..1, not 0'),
        (LEADER + shard(0, mode="request-owner") + ZERO, 'group "g" needs a [[peer]] for each group_rank 0..1, not 0'),
        (LEADER + shard(0) + TARGET + ZERO, "[draft] either every [[peer]] is group_rank 0 of a vocabulary group, or none"),
        (LEADER + shard(0, group="a") + shard(1, group="a") + TARGET + ZERO, 'a [[peer]] and a group are both "a"'),
        (LEADER + TARGET + ZERO.replace(":7900", ":7801"), '[draft] and [[peer]] "a" name one endpoint'),
        (LEADER + TARGET + ZERO.replace("127.0.0.1", "10.0.0.1"), "[draft] tcp://10.0.0.1:7900 is not a loopback address"),
        (
            LEADER + TARGET + ZERO + f'[session]\ntarget_identity = "{"t" * 252}"\n',
            '[session] for the draft link of "a": target_identity must be 1..256 printable characters',
        ),
        (
            LEADER.replace("leader", "receiver") + TARGET + ZERO,
            "[draft] is for leaders; a receiver's ranks are under [group]",
        ),
    ),
)
def test_what_is_wrong_is_one_line(text: str, error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(text, "leader.toml")
    assert error in str(raised.value)
    assert "\n" not in str(raised.value)


def test_keys_of_the_draft_links_are_read_by_check(tmp_path: Path) -> None:
    keys = '[keys]\nown = "own.secret"\nserver = "server.public"\n'
    config = parse(LEADER + FOLLOWS + keys, str(tmp_path / "peer.toml"))
    with pytest.raises(ConfigError, match="own"):
        config.check_keys()
