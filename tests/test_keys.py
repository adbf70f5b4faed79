"""Key files, allow-lists and `pp1q keys`: what is written, with which mode, and what is refused in one line."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pp1q_transport import keys
from pp1q_transport.cli.keys import keys as command
from pp1q_transport.errors import ConfigError


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_new_pair_is_written_with_its_modes_and_read_back(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    pair, secret, public = keys.generate(folder, "leader")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert keys.load_secret(secret) == pair
    assert keys.load_public(public) == pair.public
    assert pair.secret not in public.read_text()
    assert pair.secret not in repr(pair)
    assert keys.is_key(pair.public)
    assert keys.is_key(pair.secret)


def test_new_public_keys_look_like_no_option() -> None:
    for _ in range(200):
        assert keys.new_pair().public[0].isalnum()


def test_nothing_is_overwritten_and_no_half_pair_is_left(tmp_path: Path) -> None:
    pair, secret, public = keys.generate(tmp_path, "a")
    with pytest.raises(ConfigError, match="exists"):
        keys.generate(tmp_path, "a")
    assert keys.load_secret(secret) == pair
    secret.unlink()
    with pytest.raises(ConfigError, match=r"a\.public exists"):
        keys.generate(tmp_path, "a")
    assert not secret.exists()
    assert keys.load_public(public) == pair.public


@pytest.mark.parametrize("name", ("", ".", "../up", "a/b", "-rf", "a b", "x" * 65, "a\n"))
def test_a_bad_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="key name"):
        keys.generate(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", (0o640, 0o604, 0o660, 0o601, 0o610, 0o620))
def test_a_secret_others_can_reach_is_not_read(tmp_path: Path, mode: int) -> None:
    _, secret, _ = keys.generate(tmp_path, "a")
    secret.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}: run `chmod 600"):
        keys.load_secret(secret)
    secret.chmod(0o400)
    keys.load_secret(secret)


@pytest.mark.parametrize("mode", (0o664, 0o646))
def test_lists_and_public_keys_others_can_write_are_not_read(tmp_path: Path, mode: int) -> None:
    pair, _, public = keys.generate(tmp_path, "a")
    keys.allow(tmp_path / "allowed", pair.public)
    (tmp_path / "allowed").chmod(mode)
    public.chmod(mode)
    with pytest.raises(ConfigError, match="chmod go-w"):
        keys.load_allow_list(tmp_path / "allowed")
    with pytest.raises(ConfigError, match="chmod go-w"):
        keys.load_public(public)


GOOD = keys.new_pair()
OTHER = keys.new_pair()


@pytest.mark.parametrize(
    ("text", "said"),
    (
        (b"", "no valid public key"),
        (b"public = 5\n", "no valid public key"),
        (b"not toml", "is not a key file"),
        (b"public = " + b"9" * 5000, "is not a key file"),
        (b"public = " + b"[" * 5000, "is not a key file"),
        (b"\xff\xfe", "not a text file"),
        (f'public = "{GOOD.public}"\n'.encode(), "no valid secret key"),
        (f'public = "{GOOD.public}"\nsecret = "{GOOD.secret[:-1]}"\n'.encode(), "no valid secret key"),
        (f'public = "{GOOD.public}"\nsecret = "{"#" * 40}"\n'.encode(), "no valid secret key"),
        (f'public = "{GOOD.public}"\nsecret = "{OTHER.secret}"\n'.encode(), "do not belong together"),
        (b"#" * (keys.MAX_FILE_BYTES + 1), "larger than"),
    ),
)
def test_a_bad_secret_file_is_one_clear_line(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "bad.secret"
    path.write_bytes(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=said) as caught:
        keys.load_secret(path)
    assert "\n" not in str(caught.value)
    assert OTHER.secret not in str(caught.value)


def test_a_public_key_is_not_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "host.public"
    path.write_text(f'public = "{GOOD.public}"\n')
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=r"host\.public is a public key: .* \.secret file") as caught:
        keys.load_secret(path)
    assert "chmod" not in str(caught.value)


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "none", tmp_path / "pipe"):
        with pytest.raises(ConfigError):
            keys.load_secret(path)


@pytest.mark.parametrize(
    ("text", "valid"),
    (
        (GOOD.public, True),
        (GOOD.public[:-1], False),
        (GOOD.public + "0", False),
        (GOOD.public[:-1] + "~", False),
        ("%nSc0" * 8, True),  # 2^32 - 1
        ("%nSc1" * 8, False),  # 2^32
        ("0" * 40, True),
        ("#" * 40, False),
    ),
)
def test_what_a_key_is(text: str, valid: bool) -> None:
    assert keys.is_key(text) is valid


# --- allow-lists -----------------------------------------------------------------------------------------------------


def test_an_allow_list_grows_and_keeps_its_comments(tmp_path: Path) -> None:
    path = tmp_path / "allowed"
    assert keys.allow(path, GOOD.public, "the draft host")
    assert keys.allow(path, OTHER.public)
    assert not keys.allow(path, GOOD.public, "again")
    assert keys.load_allow_list(path) == {GOOD.public, OTHER.public}
    assert keys.load_allow_comments(path) == {GOOD.public: "the draft host", OTHER.public: ""}
    assert [item.name for item in tmp_path.iterdir()] == ["allowed"]  # no partial file


def test_a_list_without_its_last_newline_is_completed(tmp_path: Path) -> None:
    path = tmp_path / "allowed"
    path.write_text(f"# mine\n{GOOD.public}")
    path.chmod(0o600)
    keys.allow(path, OTHER.public)
    assert keys.load_allow_list(path) == {GOOD.public, OTHER.public}
    assert path.read_text().startswith("# mine\n")


@pytest.mark.parametrize(
    ("line", "allowed"),
    (
        ("", 0),
        ("   ", 0),
        ("# a comment", 0),
        ("#" * 40, 0),
        ("#" + GOOD.public, 0),  # a key taken off the list
        (GOOD.public, 1),
        (f"  {GOOD.public}\t# with a comment", 1),
        (f"{GOOD.public}\n{GOOD.public} # twice", 1),
        ("#" + "0" * 39, 0),  # forty characters of Z85, yet no key: its first group is above 2^32
    ),
)
def test_lines_of_an_allow_list(line: str, allowed: int) -> None:
    assert len(keys.parse_allow_list(line)) == allowed


@pytest.mark.parametrize("line", ("key", GOOD.public[:-1], f"{GOOD.public} comment", f"{GOOD.public} {OTHER.public}"))
def test_a_line_that_is_no_key_is_named(line: str) -> None:
    with pytest.raises(ConfigError, match="mine line 2 is not a public key"):
        keys.parse_allow_list(f"# head\n{line}\n", "mine")


def test_an_allow_list_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "MAX_ALLOWED_KEYS", 1)
    with pytest.raises(ConfigError, match="more than 1 keys"):
        keys.parse_allow_list(f"{GOOD.public}\n{OTHER.public}\n")


@pytest.mark.parametrize(("key", "comment"), (("short", ""), (GOOD.public, "two\nlines"), (GOOD.public, "\x1b[2J")))
def test_what_cannot_be_allowed(tmp_path: Path, key: str, comment: str) -> None:
    with pytest.raises(ConfigError):
        keys.allow(tmp_path / "allowed", key, comment)
    assert list(tmp_path.iterdir()) == []


def test_the_keys_of_both_ends(tmp_path: Path) -> None:
    server, server_secret, server_public = keys.generate(tmp_path, "server")
    client, client_secret, _ = keys.generate(tmp_path, "client")
    (tmp_path / "allowed").write_text("# nobody\n")
    (tmp_path / "allowed").chmod(0o600)
    with pytest.raises(ConfigError, match="allows nobody"):
        keys.listener_keys(server_secret, tmp_path / "allowed")
    keys.allow(tmp_path / "allowed", client.public)
    listens = keys.listener_keys(server_secret, tmp_path / "allowed")
    assert listens == keys.KeyConfig(server.public, server.secret, None, frozenset({client.public}))
    for given in (server_public, server.public):
        assert keys.connector_keys(client_secret, given).server_public == server.public
    assert server.secret not in repr(listens)
    with pytest.raises(ConfigError, match="neither a public key"):
        keys.connector_keys(client_secret, "nonsense")


# --- pp1q keys -------------------------------------------------------------------------------------------------------


def test_the_command_makes_shows_allows_and_lists(tmp_path: Path) -> None:
    made = json.loads(run("new", "leader", "--dir", tmp_path, "--json").output)
    assert set(made) == {"name", "public", "secret_file", "public_file"}
    for kind in ("secret_file", "public_file"):
        shown = json.loads(run("show", made[kind], "--json").output)
        assert shown == {"file": made[kind], "public": made["public"], "holds_secret": kind == "secret_file"}
        assert run("show", made[kind]).output == made["public"] + "\n"
    allowed = tmp_path / "allowed"
    first = json.loads(run("allow", allowed, made["public_file"], "--json").output)
    assert first == {"allow_list": str(allowed), "public": made["public"], "added": True}
    assert json.loads(run("allow", allowed, made["public"], "--json").output)["added"] is False
    listed = json.loads(run("list", allowed, "--json").output)
    assert listed == {"allow_list": str(allowed), "keys": [{"public": made["public"], "comment": "leader"}]}
    assert run("list", allowed).output == f"{made['public']}  leader\n"


def test_no_secret_is_ever_printed(tmp_path: Path) -> None:
    outputs = [run("new", "a", "--dir", tmp_path).output]
    outputs += [run("show", tmp_path / "a.secret", *flag).output for flag in ((), ("--json",))]
    secret = keys.load_secret(tmp_path / "a.secret").secret
    assert all(secret not in output for output in outputs)


@pytest.mark.parametrize(
    "arguments",
    (
        ["new", "../up"],
        ["show", "none.public"],
        ["show", "/"],
        ["list", "none"],
        ["allow", "none/allowed", GOOD.public],
        ["allow", "allowed", "nonsense"],
    ),
)
def test_bad_input_is_one_line_and_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.output.startswith("pp1q: ")
    assert result.output.count("\n") == 1


@pytest.mark.parametrize("name", ("", "new", "show", "allow", "list"))
def test_every_command_has_help_with_an_example(name: str) -> None:
    result = run(*([name] if name else []), "--help")
    assert result.exit_code == 0
    assert f"pp1q keys {name}" in result.output
    assert "Example" in result.output
    assert not name or "--json" in result.output


def test_a_secret_key_is_nothing_to_allow(tmp_path: Path) -> None:
    """It holds the public half too; that it lies where allow-lists are kept is what must not go unnoticed."""
    _pair, secret, public = keys.generate(tmp_path, "draft")
    with pytest.raises(ConfigError, match=r"draft\.secret is a secret key.*\.public file"):
        keys.public_key(secret)
    assert keys.public_key(public)
