"""The README is kept true: its commands are run as they stand, its Python as one draft and one target process."""

from __future__ import annotations

import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent

STUBS = """
import numpy as np
rng = np.random.default_rng(0)
prompt_tokens = [1, 2, 3]
row = rng.random(129280) ** 8
def my_draft_weights(context): return row
def my_verifier(tokens, qs): return len(tokens), [*tokens.tolist(), 7]
def my_target_sample(tokens): return 5
def finished(tokens): return len(tokens) > 30
"""


def commands() -> list[str]:
    """Every shell line of the README, indented or inside backticks, that runs something of the package."""
    indented = re.findall(r"^    (\.venv/bin/\S.*)$", README, re.M)
    inline = re.findall(r"`(\.venv/bin/[^`]+)`", README)
    return [*indented, *inline]


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README, re.S)


def here(command: str) -> list[str]:
    return [str(BIN / Path(word).name) if word.startswith(".venv/bin/") else word for word in shlex.split(command)]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def test_the_readme_has_what_it_promises() -> None:
    assert len(commands()) >= 5
    assert len(python_blocks()) == 2
    assert "    make demo\n" in README
    assert "    make test\n" in README
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "\ndemo:" in makefile
    assert "\ntest:" in makefile


def test_every_file_the_readme_names_exists() -> None:
    for name in re.findall(r"`((?:docs|proto)/[\w./]*)`", README):
        assert (ROOT / name).exists(), name


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", [line for line in commands() if "--connect" not in line and "--listen" not in line])
def test_commands_that_stand_alone(command: str) -> None:
    done = subprocess.run(here(command), capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_two_terminals() -> None:
    listen = next(line for line in commands() if "--listen" in line)
    connect = next(line for line in commands() if "--connect" in line)
    port = f":{free_port()}"
    receiver = subprocess.Popen(here(listen.replace(":7801", port)), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        sent = subprocess.run(here(connect.replace(":7801", port)), capture_output=True, text=True, timeout=540, check=False)
        assert sent.returncode == 0, sent.stderr
        assert "goodput" in sent.stdout
    finally:
        receiver.send_signal(signal.SIGINT)
        receiver.communicate(timeout=20)


@pytest.mark.timeout(60)
def test_the_python_of_both_sides() -> None:
    port = f":{free_port()}"
    leader, receiver = (STUBS + block.replace(":7801", port) for block in python_blocks())
    drafting = subprocess.Popen([sys.executable, "-c", leader], stderr=subprocess.PIPE)
    try:
        done = subprocess.run(
            [sys.executable, "-c", receiver + "\nassert len(request.tokens) > 30\n"],
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    finally:
        drafting.kill()
        drafting.communicate(timeout=10)


def test_the_keys_recipe(tmp_path: Path) -> None:
    """Both hosts' commands between hosts, on one: the sender that the allow-list knows is let in."""
    recipe = README[README.index("pp1q keys new receiver") :]
    lines = [line.split("#")[0].strip() for line in recipe[: recipe.index("```")].splitlines()]
    port = free_port()
    placed = [line.replace("HOST", "127.0.0.1").replace(":7801", f":{port}") for line in lines if line]
    *making, listen, connect = placed
    for command in making:
        done = subprocess.run(in_bin(command), cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done.stderr
    receiver = subprocess.Popen([*in_bin(listen), "--once"], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        small = ("--rounds", "3", "--vocab", "256", "--no-floors")
        sent = subprocess.run([*in_bin(connect), *small], cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False)
        assert sent.returncode == 0, sent.stderr
    finally:
        receiver.terminate()
        receiver.communicate(timeout=20)


def in_bin(command: str) -> list[str]:
    name, *rest = shlex.split(command)
    return [str(BIN / Path(name).name), *rest]
