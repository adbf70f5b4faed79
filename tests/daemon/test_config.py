"""The daemon's configuration: what is right is taken whole, and each thing that is wrong is one line that names it."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pp1q_transport import keys
from pp1q_transport.daemon.config import DaemonConfig, IdleStrategy, load, parse
from pp1q_transport.daemon.settings import SessionSettings
from pp1q_transport.errors import ConfigError
from pp1q_transport.session.hello import Hello, Role

LEADER = """
[daemon]
role = "leader"
socket = "/run/pp1q/draft.sock"
[[peer]]
name = "a"
connect = "tcp://127.0.0.1:7801"
"""
RECEIVER = """
[daemon]
role = "receiver"
socket = "/run/pp1q/target.sock"
[[peer]]
name = "draft"
listen = "tcp://127.0.0.1:7801"
"""
MEMBER = """
[daemon]
role = "receiver"
socket = "/run/pp1q/r1.sock"
[group]
size = 2
rank = 1
connect = "tcp://127.0.0.1:7900"
"""
FULL = """
[daemon]
role = "receiver"
name = "b-0"
socket = "/run/pp1q/target.sock"
allow_uids = [1000, 1001]
socket_mode = 0o660
idle = "spin-then-block"
metrics = "0.0.0.0:9411"
metrics_public = true
log_level = "debug"
drain_s = 2
[session]
vocab_size = 1000
depth = 4
support = 16
batch_requests = 2
batches_in_flight = 3
max_slots = 8
draft_identity = "d"
target_identity = "t"
draft_kind = "adapted"
representations = ["sparse"]
draw_proof = false
max_context_tokens = 4096
[keys]
own = "own.secret"
allow = "clients"
server = "other.public"
[[peer]]
name = "draft"
connect = "tcp://10.0.0.7:7801"
link = "tcp"
[group]
size = 4
rank = 0
mode = "replicate"
listen = "tcp://10.0.0.8:7900"
[breaker]
enabled = false
discards = 3
window_s = 0
probe_after_s = 0.5
probe_most_s = 4
[watch]
release_after_s = 0
"""


def with_line(text: str, table: str, line: str) -> str:
    """`text` with `line` under its `table`, which is added when it is not there; a key that is there is replaced."""
    lines = text.strip().splitlines()
    if table not in lines:
        return "\n".join([*lines, table, line])
    at = lines.index(table) + 1
    end = next((n for n in range(at, len(lines)) if lines[n].startswith("[")), len(lines))
    key = line.split("=")[0].strip()
    kept = [item for item in lines[at:end] if item.split("=")[0].strip() != key]
    return "\n".join([*lines[:at], *kept, line, *lines[end:]])


def test_defaults() -> None:
    config = parse(LEADER, "/etc/pp1q/a.toml")
    assert config.daemon.role is Role.LEADER
    assert config.daemon.name == "leader@draft"
    assert config.daemon.allow_uids == (os.geteuid(),)
    assert (config.daemon.socket_mode, config.daemon.idle, config.daemon.metrics) == (0o600, IdleStrategy.BLOCK, None)
    assert (config.daemon.drain_s, config.daemon.log_level) == (5.0, "info")
    assert config.session.max_slots == 8
    assert (config.breaker.enabled, config.breaker.discards, config.breaker.probe_after_s) == (True, 8, 1.0)
    assert (config.breaker.probe_most_s, config.watch.release_after_s) == (30.0, 30.0)
    assert (config.group.size, config.group.rank, config.peers[0].link) == (1, 0, "tcp")
    assert config.keys_for(config.peers[0]) is None


def test_session_keys_and_defaults_are_those_of_hello() -> None:
    hello = parse(LEADER, "f").hello(parse(LEADER, "f").peers[0], 7)
    plain = Hello(role=Role.LEADER, boot_nonce=7)
    assert {item.name for item in fields(SessionSettings)} <= {item.name for item in fields(Hello)}
    assert hello == plain


def test_everything_given_is_taken() -> None:
    config = parse(FULL, "/etc/pp1q/b.toml")
    assert config.keys is not None
    assert (str(config.keys.own), str(config.keys.allow)) == ("/etc/pp1q/own.secret", "/etc/pp1q/clients")
    assert config.keys.server == "/etc/pp1q/other.public"
    assert config.daemon.metrics is not None
    assert (config.daemon.metrics.host, config.daemon.metrics.port) == ("0.0.0.0", 9411)
    assert (config.daemon.socket_mode, config.daemon.drain_s, config.watch.release_after_s) == (0o660, 2.0, 0.0)
    hello = config.hello(config.peers[0], 7)
    assert (hello.vocab_size, hello.max_slots, hello.representations, hello.draw_proof) == (1000, 8, ("sparse",), False)
    assert (hello.group_size, hello.rank, hello.link_kinds, hello.draft_kind) == (4, 0, ("tcp",), "adapted")
    json.dumps(config.describe())


def test_bounds_are_allowed_values() -> None:
    text = with_line(LEADER, "[daemon]", f"allow_uids = {list(range(64))}")
    text = with_line(with_line(text, "[daemon]", "drain_s = 3600"), "[breaker]", "probe_after_s = 0.001")
    text = with_line(with_line(text, "[session]", f'target_identity = "{"x" * 256}"'), "[breaker]", "probe_most_s = 0.001")
    config = parse(with_line(text, "[breaker]", "discards = 10_000"), "f")
    assert (len(config.daemon.allow_uids), config.daemon.drain_s, config.breaker.probe_most_s) == (64, 3600, 0.001)


def test_a_leader_states_the_group_of_each_receiver() -> None:
    text = LEADER + 'group_size = 2\nlink = "shm"\n[[peer]]\nname = "b"\nconnect = "tcp://127.0.0.1:7802"\n'
    config = parse(text, "f")
    first, second = (config.hello(peer, 7) for peer in config.peers)
    assert (first.group_size, first.rank, first.link_kinds) == (2, 0, ("shm",))
    assert (second.group_size, second.link_kinds) == (1, ("tcp",))


OWN_LINKS = """
group = "big"
group_size = 2
group_mode = "%s"
group_rank = 0
[[peer]]
name = "b"
connect = "tcp://127.0.0.1:7802"
group = "big"
group_size = 2
group_mode = "%s"
group_rank = 1
"""


@pytest.mark.parametrize(("mode", "targets"), (("vocabulary", [["a", "b"]]), ("request-owner", [["a"], ["b"]])))
def test_a_leader_has_a_peer_for_each_rank_that_has_a_link_of_its_own(mode: str, targets: list[list[str]]) -> None:
    config = parse(LEADER + OWN_LINKS % (mode, mode), "x.toml")
    first = config.peers[0].name
    assert [[peer.name for peer in target] for target in config.targets()] == [
        [first if name == "a" else name for name in target] for target in targets
    ]
    hellos = [config.hello(peer, 1) for peer in config.peers]
    assert [(hello.rank, hello.group_mode) for hello in hellos] == [(0, mode), (1, mode)]
    whole = hellos[0].slot_part_bytes["dense_request"] == 2_585_600
    assert whole is (mode == "request-owner")


@pytest.mark.parametrize(
    ("change", "words"),
    (
        (("group_rank = 1", "group_rank = 0"), 'group "big" needs a [[peer]] for each group_rank 0..1, not 0, 0'),
        (("group_rank = 1", "group_rank = 2"), "group_rank must be an integer in 0..1"),
        (("group_rank = 0\n", ""), "group_rank is missing"),
        (('group_mode = "vocabulary"\ngroup_rank = 0', 'group_mode = "request-owner"\ngroup_rank = 0'), "differ in group_size"),
        (('group = "big"\ngroup_size = 2\ngroup_mode = "vocabulary"\ngroup_rank = 1', 'group = "x y"\ngroup_size = 2\n'
          'group_mode = "vocabulary"\ngroup_rank = 1'), "group must be 1..64 letters"),
        (('group_mode = "vocabulary"\ngroup_rank = 1', 'group_rank = 1'), "group is not allowed: only the ranks"),
    ),
)  # fmt: skip
def test_what_is_wrong_with_the_ranks_of_a_group(change: tuple[str, str], words: str) -> None:
    text = OWN_LINKS % ("vocabulary", "vocabulary")
    assert change[0] in text
    with pytest.raises(ConfigError) as refused:
        parse(LEADER + text.replace(*change), "x.toml")
    assert words in str(refused.value)


def test_a_rank_with_a_link_of_its_own_has_a_peer() -> None:
    text = MEMBER.replace("[group]", '[group]\nmode = "vocabulary"')
    with pytest.raises(ConfigError, match=r"exactly one \[\[peer\]\]"):
        parse(text, "x.toml")
    config = parse(text + '[[peer]]\nname = "leader"\nconnect = "tcp://127.0.0.1:7801"\n', "x.toml")
    hello = config.hello(config.peers[0], 1)
    assert (hello.rank, hello.group_mode, hello.role.value) == (1, "vocabulary", "receiver")
    group = '[group]\nsize = 8\nmode = "vocabulary"\nlisten = "tcp://127.0.0.1:1"\n'
    with pytest.raises(ConfigError, match="a vocabulary of 40 has no 8 ranges"):
        parse(RECEIVER + "[session]\nvocab_size = 40\nsupport = 4\n" + group, "x.toml")


def test_a_member_of_a_replicate_group_has_no_peer() -> None:
    config = parse(MEMBER, "f")
    assert config.peers == ()
    assert (config.group.rank, config.group.connect) == (1, "tcp://127.0.0.1:7900")


def test_max_slots_follows_the_batches() -> None:
    text = with_line(with_line(LEADER, "[session]", "batch_requests = 5"), "[session]", "batches_in_flight = 3")
    assert parse(text, "f").session.max_slots == 15


# base, table, line, what the error names
WRONG = (
    (LEADER, "[daemon]", 'role = "both"', '[daemon] role must be "leader" or "receiver", not \'both\''),
    (LEADER, "[daemon]", "role = 1", "[daemon] role"),
    (LEADER, "[daemon]", 'socket = "run/x.sock"', "[daemon] socket must be an absolute path"),
    (LEADER, "[daemon]", f'socket = "/{"é" * 53}s"', "[daemon] socket must be an absolute path of at most 107 bytes"),
    (LEADER, "[daemon]", 'socket = "/run/x\\u0000"', "[daemon] socket"),
    (LEADER, "[daemon]", 'socket = "/run/"', "[daemon] socket"),
    (LEADER, "[daemon]", 'name = "a b"', "[daemon] name"),
    (LEADER, "[daemon]", "allow_uids = []", "[daemon] allow_uids must be a list of 1..64 user IDs, not []"),
    (LEADER, "[daemon]", f"allow_uids = {list(range(65))}", "[daemon] allow_uids"),
    (LEADER, "[daemon]", "allow_uids = [true]", "[daemon] allow_uids"),
    (LEADER, "[daemon]", "allow_uids = [-1]", "[daemon] allow_uids"),
    (LEADER, "[daemon]", "allow_uids = [4294967295]", "[daemon] allow_uids"),
    (LEADER, "[daemon]", "allow_uids = [1, 1]", "none twice"),
    (LEADER, "[daemon]", "socket_mode = 0o666", "[daemon] socket_mode must be 0o600 or 0o660"),
    (LEADER, "[daemon]", 'socket_mode = "0600"', "[daemon] socket_mode"),
    (LEADER, "[daemon]", 'idle = "nap"', '"block" or "spin" or "spin-then-block"'),
    (LEADER, "[daemon]", 'metrics = "0.0.0.0:9411"', "[daemon] metrics must be a loopback address unless metrics_public"),
    (LEADER, "[daemon]", 'metrics = "host:9411"', "[daemon] metrics must be an IP address"),
    (LEADER, "[daemon]", 'metrics = "9411"', "[daemon] metrics"),
    (LEADER, "[daemon]", 'metrics = "127.0.0.1:65536"', "[daemon] metrics"),
    (LEADER, "[daemon]", "metrics_public = true", "[daemon] metrics_public"),
    (LEADER, "[daemon]", 'log_level = "loud"', "[daemon] log_level"),
    (LEADER, "[daemon]", "drain_s = 0", "[daemon] drain_s must be a number of seconds in 0.001..3600, not 0"),
    (LEADER, "[daemon]", "drain_s = -1.0", "[daemon] drain_s"),
    (LEADER, "[daemon]", "drain_s = nan", "[daemon] drain_s"),
    (LEADER, "[daemon]", "drain_s = inf", "[daemon] drain_s"),
    (LEADER, "[daemon]", "drain_s = true", "[daemon] drain_s"),
    (LEADER, "[daemon]", 'drain_s = "5"', "[daemon] drain_s"),
    (LEADER, "[daemon]", "drain_s = " + "9" * 400, "[daemon] drain_s"),
    (LEADER, "[daemon]", "drain_s = 0x" + "f" * 5000, "[daemon] drain_s"),
    (LEADER, "[session]", "depth = 0x" + "f" * 5000, "[session] depth must be an integer, not a number of thousands of digits"),
    (LEADER, "[daemon]", "max_clients = 2", "[daemon] has no key 'max_clients'"),
    (LEADER, "[daemon]", "drains_s = 2", "[daemon] has no key 'drains_s': did you mean `drain_s`?"),
    (LEADER, "[session]", "max_slot = 2", "[session] has no key 'max_slot': did you mean `max_slots`?"),
    (LEADER, "[[peer]]", "Link = 'shm'", "[[peer]] 1: has no key 'Link': did you mean `link`?"),
    (LEADER, "[watch]", "release_after = 2", "did you mean `release_after_s`?"),
    (LEADER, "[session]", "depth = 0", "[session] depth must be 1..32, not 0"),
    (LEADER, "[session]", "depth = true", "[session] depth must be an integer, not true"),
    (LEADER, "[session]", "depth = 5.0", "[session] depth must be an integer"),
    (LEADER, "[session]", "vocab_size = 16777217", "[session] vocab_size"),
    (LEADER, "[session]", "vocab_size = 16", "[session] support must be <= vocab_size 16, not 32"),
    (LEADER, "[session]", "max_slots = 7", "[session] max_slots must be >= 4 requests x 2 batches, not 7"),
    (LEADER, "[session]", "batch_requests = 1024\nbatches_in_flight = 64", "(batch_requests x batches_in_flight)"),
    (LEADER, "[session]", "support = -1", "[session] support"),
    (LEADER, "[session]", 'draft_identity = ""', "[session] draft_identity"),
    (LEADER, "[session]", f'draft_identity = "{"x" * 257}"', "[session] draft_identity must be a text of 1..256"),
    (LEADER, "[session]", 'draft_identity = "a\\nb"', "[session] draft_identity"),
    (LEADER, "[session]", 'draft_kind = "own"', "[session] draft_kind must be native or adapted, not own"),
    (LEADER, "[session]", 'representations = "dense"', "[session] representations"),
    (LEADER, "[session]", 'representations = ["sparse", "dense"]', "[session] representations"),
    (LEADER, "[session]", "representations = [1]", "[session] representations"),
    (LEADER, "[session]", 'representations = ["zip"]', "[session] representations"),
    (LEADER, "[session]", "draw_proof = 1", "[session] draw_proof must be true or false, not 1"),
    (LEADER, "[session]", "rank = 1", "[session] has no key 'rank'"),
    (LEADER, "[group]", "size = 1", "[group] is for receivers"),
    (LEADER, "[[peer]]", "name = 3", "[[peer]] 1: name"),
    (LEADER, "[[peer]]", 'name = "a/b"', "[[peer]] 1: name"),
    (LEADER, "[[peer]]", 'listen = "tcp://127.0.0.1:1"', "[[peer]] 1: give exactly one of listen and connect"),
    (LEADER, "[[peer]]", 'connect = "127.0.0.1:7801"', "[[peer]] 1: connect: endpoint"),
    (LEADER, "[[peer]]", 'connect = "tcp://127.0.0.1:0"', "[[peer]] 1: connect"),
    (LEADER, "[[peer]]", 'connect = "tcp://0.0.0.0:7801"', "[[peer]] 1: connect"),
    (LEADER, "[[peer]]", 'connect = "tcp://10.0.0.1:7801"', "not a loopback address and needs [keys]"),
    (LEADER, "[[peer]]", 'link = "roce"', '[[peer]] 1: link must be "tcp" or "shm" or "rdma"'),
    (LEADER, "[rdma]", 'device = "rxe0"', '[rdma] is of no use: no [[peer]] has link = "rdma"'),
    (LEADER, "[rdma]", "mtu = 1000", "[rdma] rdma mtu 1000 is none of auto"),
    (LEADER, "[rdma]", "timeout = 0x1" + "0" * 5000, "[rdma] rdma timeout a number of thousands of digits is not"),
    (LEADER, "[rdma]", "retries = 3", "[rdma] it has no setting 'retries'"),
    (LEADER, "[[peer]]", 'group_mode = "mirror"', "[[peer]] 1: group_mode must be \"replicate\" or \"vocabulary\" or"),
    (LEADER, "[[peer]]", 'group = "a"', "[[peer]] 1: group is not allowed: only the ranks"),
    (RECEIVER, "[[peer]]", "group_rank = 0", "[[peer]] 1: group_rank is not allowed"),
    (LEADER, "[[peer]]", "group_size = 9", "[[peer]] 1: group_size must be an integer in 1..8"),
    (LEADER, "[[peer]]", 'server = "x.public"', "server is only for an end that connects, with [keys] own"),
    (LEADER, "[[peer]]", "weight = 1", "[[peer]] 1: has no key 'weight'"),
    (LEADER, "[keys]", 'own = "a"', "[keys] server is missing"),
    (LEADER, "[keys]", 'own = "a"\nserver = "s"\nallow = "b"', "[keys] allow is of no use"),
    (LEADER, "[keys]", 'server = "s"', "[keys] own is missing"),
    (LEADER, "[breaker]", "discards = 0", "[breaker] discards must be an integer in 1..10000, not 0"),
    (LEADER, "[breaker]", "enabled = 1", "[breaker] enabled must be true or false, not 1"),
    (LEADER, "[breaker]", "probe_after_s = 0", "[breaker] probe_after_s"),
    (LEADER, "[breaker]", "probe_after_s = 31", "[breaker] probe_most_s must be at least probe_after_s (31)"),
    (LEADER, "[breaker]", "window_s = -1", "[breaker] window_s must be 0 or a number"),
    (LEADER, "[watch]", "release_after_s = -0.5", "[watch] release_after_s"),
    (LEADER, "[tuning]", "x = 1", "there is no table [tuning]"),
    (RECEIVER, "[[peer]]", "group_size = 2", "[[peer]] 1: group_size is not allowed"),
    (RECEIVER, "[[peer]]", 'listen = "tcp://*:7801"', "0.0.0.0:7801 is not a loopback address and needs [keys]"),
    (RECEIVER, "[[peer]]", 'listen = "tcp://host:7801"', "needs [keys]"),
    (RECEIVER, "[keys]", 'own = "a"', "[keys] allow is missing"),
    (RECEIVER, "[keys]", 'own = "a"\nallow = []', "[keys] allow must be"),
    (RECEIVER, "[keys]", 'own = "a"\nallow = [1]', "[keys] allow must be"),
    (RECEIVER, "[keys]", 'own = "a"\nallow = "b"\nserver = "c"', "[keys] server is of no use"),
    (RECEIVER, "[group]", "size = 0", "[group] size must be an integer in 1..8"),
    (RECEIVER, "[group]", "size = 9", "[group] size"),
    (RECEIVER, "[group]", "size = 2\nrank = 2", "[group] rank must be an integer in 0..1, not 2"),
    (RECEIVER, "[group]", 'mode = "mirror"', "[group] mode"),
    (RECEIVER, "[group]", 'listen = "tcp://127.0.0.1:1"', "[group] listen is not allowed: a group of one"),
    (RECEIVER, "[group]", "size = 2", "[group] listen is missing"),
    (RECEIVER, "[group]", "size = 2\nrank = 1", "[group] connect is missing"),
    (RECEIVER, "[group]", 'size = 2\nconnect = "tcp://127.0.0.1:1"', "[group] connect is not allowed"),
    (RECEIVER, "[group]", 'size = 2\nrank = 1\nlisten = "tcp://127.0.0.1:1"', "[group] listen is not allowed"),
    (RECEIVER, "[group]", 'size = 2\nlisten = "tcp://127.0.0.1:7801"', "name one endpoint"),
    (RECEIVER, "[group]", 'size = 2\nlisten = "tcp://10.0.0.1:79"', "[group] tcp://10.0.0.1:79 is not a loopback address"),
    (RECEIVER, "[group]", 'size = 2\nrank = 1\nconnect = "tcp://127.0.0.1:1"', "rank 1 of a replicate group has no [[peer]]"),
    (MEMBER, "[keys]", 'own = "a"', "[keys] server is missing: [group] connects"),
)  # fmt: skip


@pytest.mark.parametrize(("base", "table", "line", "named"), WRONG, ids=[f"{table} {line}"[:60] for _, table, line, _ in WRONG])
def test_what_is_wrong_is_one_line_that_names_it(base: str, table: str, line: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(with_line(base, table, line), "/etc/pp1q/x.toml")
    text = str(caught.value)
    assert text.startswith("/etc/pp1q/x.toml")
    assert named in text
    assert text.isprintable()


TEXTS = (
    ("", "[daemon] is missing"),
    ("daemon = 3", "[daemon] must be a table, not 3"),
    ("[daemon", "is not TOML"),
    ("[daemon]\nrole='leader'\nrole='leader'", "x.toml: line 3 gives role a second time"),
    ("[daemon]\nrole='leader'\n\n[keys]\n[daemon]\nname = 'a'", "x.toml: line 5 gives [daemon] a second time"),
    ("[[peer]]\n[peer]", "x.toml: line 2 gives [peer] a second time"),
    ("daemon = {role='leader', role='leader'}", "x.toml: line 1 gives a key a second time"),
    ('a = 1\na = """\n"""', "x.toml: line 3 gives a key a second time"),
    ("x = " + "9" * 5000, "is not TOML"),
    ("x = " + "[" * 50_000, "is not TOML"),
    ("[daemon]\nrole = 'leader'\nsocket = '/s'", "a leader needs 1..16 [[peer]]"),
    ("[daemon]\nsocket = '/s'", "[daemon] role is missing"),
    ("[daemon]\nrole = 'leader'", "[daemon] socket is missing"),
    ("[daemon]\nrole = 'receiver'\nsocket = '/s'", "exactly one [[peer]], its leader; there are 0"),
    (RECEIVER + "[[peer]]\nname = 'b'\nlisten = 'tcp://127.0.0.1:1'", "exactly one [[peer]], its leader; there are 2"),
    (LEADER + "[[peer]]\nname = 'a'\nconnect = 'tcp://127.0.0.1:1'", "[[peer]] 2: name must be the only one"),
    (LEADER + "[[peer]]\nname = 'b'\nconnect = 'tcp://localhost:7801'", 'b" and [[peer]] "a" name one endpoint'),
    (LEADER + "".join(f"[[peer]]\nname = 'p{n}'\nconnect = 'tcp://127.0.0.1:{n}'\n" for n in range(1, 17)), "at most 16"),
    (LEADER.replace("[[peer]]", "[peer]"), "write each peer under [[peer]]"),
    ("peer = [3]\n" + LEADER.split("[[peer]]")[0], "[[peer]] 1: must be a table"),
    (LEADER.replace('name = "a"', ""), "[[peer]] 1: name is missing"),
    (FULL.replace('link = "tcp"', 'link = "shm"'), "shm stays on this host"),
)  # fmt: skip


@pytest.mark.parametrize(("text", "named"), TEXTS, ids=[named for _, named in TEXTS])
def test_what_is_missing_or_too_much(text: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "x.toml")
    assert named in str(caught.value)
    assert str(caught.value).startswith("x.toml")
    assert "\n" not in str(caught.value)


def test_sixteen_peers_and_two_any_ports_are_fine() -> None:
    more = "".join(f"[[peer]]\nname = 'p{n}'\nlisten = 'tcp://127.0.0.1:0'\n" for n in range(15))
    assert len(parse(LEADER + more, "f").peers) == 16


VALUES = st.one_of(
    st.integers(-(1 << 70), 1 << 70).map(str), st.floats().map(repr), st.sampled_from(("true", "false", "1e400")),
    st.text(max_size=9).map(json.dumps), st.sampled_from(("[]", "[1]", "{}", "{a = 1}", "1979-05-27", "[[1], 'x']", "07:32:00")),
)  # fmt: skip
KEYS = tuple(line.split(" =")[0] for line in FULL.splitlines() if " = " in line)


TABLES = ("[daemon]", "[session]", "[keys]", "[[peer]]", "[group]", "[breaker]", "[watch]")


@given(st.sampled_from(TABLES), st.sampled_from(KEYS), VALUES)
def test_no_value_of_any_key_raises_anything_else(table: str, key: str, value: str) -> None:
    if key == "vocab_size" and value.isdigit():
        return  # hashing the map of a large vocabulary takes a second
    try:
        assert isinstance(parse(with_line(FULL, table, f"{key} = {value}"), "f"), DaemonConfig)
    except ConfigError as fault:
        assert str(fault).startswith("f")  # noqa: PT017
        assert "\n" not in str(fault)  # noqa: PT017


# ---- files and keys -------------------------------------------------------------------------------------------------


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "daemon.toml"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o644)
    return path


def test_load_reads_the_keys_it_names(tmp_path: Path) -> None:
    ours, _, _ = keys.generate(tmp_path, "own")
    theirs, _, public = keys.generate(tmp_path, "other")
    keys.allow(tmp_path / "clients", theirs.public)
    config = load(write(tmp_path, FULL.replace("10.0.0.8:7900", "10.0.0.8:0")))
    outgoing, group = config.keys_for(config.peers[0]), config.keys_for(config.group)
    assert outgoing is not None
    assert (outgoing.own_public, outgoing.server_public, outgoing.allow) == (ours.public, theirs.public, frozenset())
    assert group is not None
    assert (group.server_public, group.allow) == (None, frozenset({theirs.public}))
    assert ours.secret not in json.dumps(config.describe())
    listed = load(write(tmp_path, FULL.replace('"clients"', f'["{public.name}", {json.dumps(ours.public)}]')))
    group = listed.keys_for(listed.group)
    assert group is not None
    assert group.allow == {theirs.public, ours.public}


def test_each_peer_may_have_a_server_key_of_its_own(tmp_path: Path) -> None:
    keys.generate(tmp_path, "own")
    first, second = (keys.generate(tmp_path, name)[0] for name in ("first", "second"))
    text = LEADER + 'server = "second.public"\n[[peer]]\nname = "b"\nconnect = "tcp://10.0.0.1:7802"\n'
    config = load(write(tmp_path, text + '[keys]\nown = "own.secret"\nserver = "first.public"\n'))
    found = [config.keys_for(peer) for peer in config.peers]
    assert [item.server_public for item in found if item is not None] == [second.public, first.public]


@pytest.mark.parametrize(
    ("text", "named"),
    ((FULL, "own.secret"), (FULL.replace('"own.secret"', '"loose.secret"'), "chmod 600")),
    ids=("missing", "loose"),
)
def test_load_refuses_keys_that_do_not_serve(tmp_path: Path, text: str, named: str) -> None:
    _, secret, _ = keys.generate(tmp_path, "loose")
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match=r"daemon\.toml: \[keys\] .*" + named) as caught:
        load(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_load_refuses_files_that_are_none(tmp_path: Path) -> None:
    path = write(tmp_path, LEADER)
    assert load(path).daemon.role is Role.LEADER
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="chmod o-w"):
        load(path)
    path.chmod(0o644)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not a text file"):
        load(path)
    path.write_text("#" * (1 << 20) + "\n")
    with pytest.raises(ConfigError, match="larger than"):
        load(path)
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="not a regular file"):
        load("/dev/null")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="not a regular file"):
        load(tmp_path / "fifo")


# ---- reload ---------------------------------------------------------------------------------------------------------

CHANGES = (
    ("[daemon]", 'log_level = "error"', ("daemon.log_level",), ()),
    ("[daemon]", "allow_uids = [5]", ("daemon.allow_uids",), ()),
    ("[daemon]", "drain_s = 9", ("daemon.drain_s",), ()),
    ("[breaker]", "discards = 2", ("breaker.discards",), ()),
    ("[watch]", "release_after_s = 2", ("watch.release_after_s",), ()),
    ("[daemon]", 'socket = "/other.sock"', (), ("daemon.socket",)),
    ("[daemon]", "socket_mode = 0o600", (), ("daemon.socket_mode",)),
    ("[daemon]", 'metrics = "127.0.0.1:1"', (), ("daemon.metrics.host", "daemon.metrics.port")),
    ("[session]", "depth = 3", (), ("session.depth",)),
    ("[keys]", 'own = "new.secret"', (), ("keys.own",)),
    ("[[peer]]", 'connect = "tcp://10.0.0.9:1"', (), ("peers.draft.connect",)),
    ("[group]", "size = 3", (), ("group.size",)),
)


@pytest.mark.parametrize(("table", "line", "live", "restart"), CHANGES, ids=[f"{table} {line}" for table, line, _, _ in CHANGES])
def test_a_reload_tells_what_changes_live(table: str, line: str, live: tuple[str, ...], restart: tuple[str, ...]) -> None:
    before, after = parse(FULL, "f"), parse(with_line(FULL, table, line), "f")
    assert before.reloadable(after) == (live, restart)
    assert before.with_live(after) == (after if live else before)
    assert before.reloadable(before) == ((), ())


def test_peers_that_come_and_go_need_a_restart() -> None:
    before, after = parse(LEADER, "f"), parse(LEADER.replace('"a"', '"b"'), "f")
    changes = before.reloadable(after)
    assert changes.live == ()
    assert "peers.a.connect" in changes.restart
    assert "peers.b.connect" in changes.restart
