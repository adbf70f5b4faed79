"""CURVE key files and allow-lists: who may speak on the control plane.

Between the files an operator keeps and `control`, which hands the keys to ZeroMQ. Opens no socket and decides about no
peer. A secret file that others can read, or an allow-list that others can write, is refused rather than used. SPEC 2.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import zmq

from .errors import ConfigError

KEY_CHARS: Final = 40  # 32 bytes in Z85
MAX_FILE_BYTES: Final = 1 << 20
MAX_ALLOWED_KEYS: Final = 4096
SECRET_SUFFIX: Final = ".secret"
PUBLIC_SUFFIX: Final = ".public"
_Z85: Final = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_DIGITS: Final = {char: index for index, char in enumerate(_Z85)}
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """One CURVE key pair, both halves as 40 characters of Z85."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class KeyConfig:
    """The keys of one end of the control plane. A listener needs `allow` (the clients' public keys), a connector needs
    `server_public` (the listener's)."""

    own_public: str
    own_secret: str = field(repr=False)
    server_public: str | None = None
    allow: frozenset[str] = frozenset()


def is_key(text: str) -> bool:
    """Whether `text` is 32 bytes in Z85 (each group of five digits below 2^32)."""
    if len(text) != KEY_CHARS or not set(text) <= _DIGITS.keys():
        return False
    for start in range(0, KEY_CHARS, 5):
        value = 0
        for char in text[start : start + 5]:
            value = value * 85 + _DIGITS[char]
        if value >= 1 << 32:
            return False
    return True


def new_pair() -> KeyPair:
    """A fresh pair whose public key starts with a letter or digit, so that no command takes it for an option (it costs
    half a bit of 256)."""
    while True:
        public, secret = (half.decode("ascii") for half in zmq.curve_keypair())
        if public[0].isalnum():
            return KeyPair(public, secret)


def generate(directory: str | Path, name: str) -> tuple[KeyPair, Path, Path]:
    """Writes `NAME.secret` (mode 0600) and `NAME.public` into `directory` (made, mode 0700, if missing); returns the
    pair and both paths. Never overwrites. Raises `ConfigError`."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"key name {name!r}: use 1..64 letters, digits, dots, dashes or underscores")
    folder = Path(directory)
    secret_path, public_path = folder / (name + SECRET_SUFFIX), folder / (name + PUBLIC_SUFFIX)
    pair = new_pair()
    public_line = f'public = "{pair.public}"\n'
    secret_text = f'# CURVE secret key "{name}": it stays on this machine.\n{public_line}secret = "{pair.secret}"\n'
    public_text = f'# CURVE public key "{name}": give this to the other side.\n{public_line}'
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_new(secret_path, secret_text, 0o600)
        try:
            _write_new(public_path, public_text, 0o644)
        except OSError:
            secret_path.unlink()  # it is ours, made one line above: leave no half of a pair behind
            raise
    except FileExistsError as fault:
        raise ConfigError(f"{fault.filename} exists: choose another name or remove it first") from None
    except OSError as fault:
        raise ConfigError(f"cannot write keys to {folder}: {fault.strerror}") from None
    return pair, secret_path, public_path


def _write_new(path: Path, text: str, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "w") as file:
        file.write(text)


def _read(path: str | Path, forbidden: int, remedy: str) -> str:
    """The text of a small regular file that carries none of the `forbidden` mode bits (judged on the open file)."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise ConfigError(f"{path} is not a regular file")
            if state.st_mode & forbidden:
                raise ConfigError(f"{path} has mode {stat.S_IMODE(state.st_mode):04o}: run `chmod {remedy} {path}`")
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as fault:
        raise ConfigError(f"cannot read {path}: {fault.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file") from None


def _read_keys(path: str | Path, text: str, names: tuple[str, ...]) -> tuple[str, ...]:
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as fault:  # TOML's own error is the first; Python has others for long numbers and depth
        raise ConfigError(f"{path} is not a key file: {fault}") from None
    values = tuple(table.get(name) for name in names)
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, str) or not is_key(value):
            raise ConfigError(f"{path} holds no valid {name} key: make one with `pp1q keys new`")
    return tuple(str(value) for value in values)


def load_secret(path: str | Path) -> KeyPair:
    """The pair in a `.secret` file. Raises `ConfigError`, also for a file that others can reach, or whose halves do
    not belong together."""
    if str(path).endswith(PUBLIC_SUFFIX):
        raise ConfigError(f"{path} is a public key: this side's own key is the .secret file beside it")
    public, secret = _read_keys(path, _read(path, 0o077, "600"), ("public", "secret"))
    if zmq.curve_public(secret.encode("ascii")).decode("ascii") != public:
        raise ConfigError(f"{path}: its public and secret key do not belong together")
    return KeyPair(public, secret)


def load_public(path: str | Path) -> str:
    """The public key in a `.public` file. Raises `ConfigError`."""
    (public,) = _read_keys(path, _read(path, 0o022, "go-w"), ("public",))
    return public


def parse_allow_list(text: str, source: str = "allow-list") -> dict[str, str]:
    """Public key -> its comment, in order. One key a line, then optionally white space and `# comment`; a line that
    starts with `#` is a comment (Z85 has `#` too, but no key can start with it). Raises `ConfigError`."""
    allowed: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        key, rest = (*line.split(None, 1), "", "")[:2]
        rest = rest.strip()
        if is_key(key) and (not rest or rest.startswith("#")):
            allowed[key] = rest[1:].strip()
        elif key and not key.startswith("#"):
            raise ConfigError(f"{source} line {number} is not a public key of {KEY_CHARS} Z85 characters")
    if len(allowed) > MAX_ALLOWED_KEYS:
        raise ConfigError(f"{source} holds more than {MAX_ALLOWED_KEYS} keys")
    return allowed


def load_allow_list(path: str | Path) -> frozenset[str]:
    """The public keys that may connect. Raises `ConfigError`, also for a file that group or world can write."""
    return frozenset(load_allow_comments(path))


def load_allow_comments(path: str | Path) -> dict[str, str]:
    """Public key -> comment of an allow-list file, in order. Raises `ConfigError`, as `load_allow_list` does."""
    return parse_allow_list(_read(path, 0o022, "go-w"), str(path))


def allow(path: str | Path, key: str, comment: str = "") -> bool:
    """Adds `key` to the allow-list file; False when it was there already. Replaces the file in one step, so a reader
    sees the old list or the new one. Raises `ConfigError`."""
    if not is_key(key):
        raise ConfigError(f"{key!r} is not a public key of {KEY_CHARS} Z85 characters")
    if not comment.isprintable():
        raise ConfigError("a comment is one line of printable text")
    target = Path(path)
    text = _read(path, 0o022, "go-w") if os.path.lexists(path) else "# public keys that may connect, one a line\n"
    if key in parse_allow_list(text, str(path)):
        return False
    text += "" if text.endswith("\n") else "\n"
    text += key + (f"  # {comment}" if comment else "") + "\n"
    parse_allow_list(text, str(path))
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        _write_new(partial, text, 0o644)
        os.replace(partial, target)
    except OSError as fault:
        raise ConfigError(f"cannot write {path}: {fault.strerror}") from None
    return True


def listener_keys(secret_path: str | Path, allow_path: str | Path) -> KeyConfig:
    """The keys of a listener from its two files. Raises `ConfigError`, also for an empty allow-list."""
    pair, allowed = load_secret(secret_path), load_allow_list(allow_path)
    if not allowed:
        raise ConfigError(f"{allow_path} allows nobody: add a client with `pp1q keys allow {allow_path} CLIENT.public`")
    return KeyConfig(pair.public, pair.secret, allow=allowed)


def connector_keys(secret_path: str | Path, server: str | Path) -> KeyConfig:
    """The keys of a connector; `server` is the listener's public key or its `.public` file. Raises `ConfigError`."""
    pair = load_secret(secret_path)
    return KeyConfig(pair.public, pair.secret, server_public=public_key(server))


def public_key(key_or_path: str | Path) -> str:
    """A public key given as such or as a `.public` file. Raises `ConfigError`."""
    if is_key(str(key_or_path)):
        return str(key_or_path)
    if not os.path.lexists(key_or_path):
        raise ConfigError(f"{key_or_path} is neither a public key ({KEY_CHARS} characters of Z85) nor a .public file")
    if str(key_or_path).endswith(SECRET_SUFFIX):  # it holds the public half too, but should not have come here at all
        raise ConfigError(f"{key_or_path} is a secret key, which stays where it was made: give the .public file beside it")
    return load_public(key_or_path)
