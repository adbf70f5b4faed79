"""The machine's first root as a cpio archive: busybox, the init script, and the modules without which there is no shared folder.

Between `run.py` and the kernel, which unpacks it. Knows the archive's format (newc) and modprobe's answers, nothing of lanes.
"""

from __future__ import annotations

import gzip
import lzma
import stat
import subprocess
from pathlib import Path

FIRST_MODULES = ("virtio_pci", "virtio_console", "virtio_rng", "9pnet_virtio", "9p", "overlay")
FOLDERS = ("bin", "sbin", "proc", "sys", "dev", "modules", "results")


def _entry(name: str, mode: int, content: bytes = b"") -> bytes:
    fields = (0, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
    head = b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
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
