"""The machine's first root as a cpio archive: busybox, the init script, and the modules without which there is no shared folder;
and an archive of the host's files that every process inside opens, since each of them costs a shared folder milliseconds.

Between `machine.py` and the kernel, which unpacks both. Knows the archive's format (newc) and modprobe's answers, no lanes.
"""

from __future__ import annotations

import gzip
import lzma
import os
import re
import stat
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

FIRST_MODULES = ("virtio_pci", "virtio_console", "virtio_rng", "9pnet_virtio", "9p", "overlay")
FOLDERS = ("bin", "sbin", "proc", "sys", "dev", "modules", "results")


def _entry(name: str, mode: int, content: bytes = b"", mtime: int = 0) -> bytes:
    encoded = os.fsencode(name)
    fields = (0, mode, 0, 0, 1, mtime, len(content), 0, 0, 0, 0, len(encoded) + 1, 0)
    head = b"070701" + b"".join(b"%08x" % field for field in fields) + encoded + b"\0"
    return head + bytes(-len(head) % 4) + content + bytes(-len(content) % 4)


def first_modules(kernel: Path) -> list[Path]:
    """Module files in the order in which they must be loaded."""
    version = next((kernel / "lib" / "modules").iterdir()).name
    command = ["/sbin/modprobe", "--set-version", version, "--dirname", str(kernel), "--all", "--show-depends", *FIRST_MODULES]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    paths = [line.split()[1] for line in answer.splitlines() if line.startswith("insmod ")]
    return [Path(path) for path in dict.fromkeys(paths)]


def write_archive(target: Path, kernel: Path, init: Path) -> None:
    """Writes the archive for `kernel` (an unpacked kernel package) to `target`."""
    parts = [_entry(folder, stat.S_IFDIR | 0o755) for folder in FOLDERS]
    parts.append(_entry("bin/busybox", stat.S_IFREG | 0o755, Path("/bin/busybox").read_bytes()))
    parts.append(_entry("init", stat.S_IFREG | 0o755, init.read_bytes()))
    for number, path in enumerate(first_modules(kernel)):
        content = path.read_bytes()
        name = path.name
        if name.endswith(".xz"):
            name, content = name.removesuffix(".xz"), lzma.decompress(content)
        parts.append(_entry(f"modules/{number:02}-{name}", stat.S_IFREG | 0o644, content))
    parts.append(_entry("TRAILER!!!", 0))
    target.write_bytes(gzip.compress(b"".join(parts), compresslevel=1))


# ---- the host's files -------------------------------------------------------------------------------------------------

FILES = "files"  # the folder they are in, under their own paths
# Large, and of no use to a lane; who looks for them finds them in the shared folder.
LEFT_OUT = re.compile(
    r"/(\.[^/]*|site-packages|test|tests|idlelib|tkinter|ensurepip|lib2to3|turtledemo|config-[^/]*|build|dist|__mypyc[^/]*"
    r"|scipy|scipy\.libs|mypy|mypyc|ruff|pip|setuptools|pkg_resources|[^/]*\.(a|pyi|h|html)|[^/]*__mypyc\.[^/]*)$"
)
WHOLE = ("pp1q_transport", "tests", "proto", "docs")  # of the repository


def _walk(top: Path) -> Iterator[Path]:
    for entry in sorted(os.scandir(top), key=lambda entry: entry.name):
        if not LEFT_OUT.search(entry.path):
            yield Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path))


def host_files(repository: Path, verbs: Path) -> Iterator[Path]:
    """What Python inside reads: the standard library, what is installed, pyverbs (`verbs` is a link to it) and this repository;
    each folder before what is in it."""
    tops = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    tops |= {verbs, verbs.resolve(), *(repository / name for name in WHOLE)}
    seen: set[Path] = set()
    for top in sorted(tops):
        for place in (*reversed(top.parents), top):
            if place not in seen:
                seen.add(place)
                yield place
        if not top.is_symlink():
            yield from _walk(top)


def write_files(target: BinaryIO, paths: Iterator[Path]) -> None:
    """Appends an archive of these to `target`, with their times, by which Python knows that bytecode is that of its source."""
    target.write(bytes(-target.tell() % 4) + _entry(FILES, stat.S_IFDIR | 0o755))
    for path in paths:
        try:
            target.write(_copy(path))
        except FileNotFoundError:  # since it was listed: bytecode is written under a name of its own first
            continue
    target.write(_entry("TRAILER!!!", 0))


def _copy(path: Path) -> bytes:
    about = path.lstat()
    name, mode, mtime = f"{FILES}{path}", about.st_mode, int(about.st_mtime)
    if stat.S_ISLNK(mode):
        return _entry(name, mode, os.fsencode(os.readlink(path)), mtime)
    if stat.S_ISREG(mode):
        return _entry(name, mode, path.read_bytes(), mtime)
    return _entry(name, mode, b"", mtime) if stat.S_ISDIR(mode) else b""
