"""A throw-away machine with Soft-RoCE: QEMU without KVM, the host's own files inside, one folder to write to.

Between `run.py` and qemu. Boots, runs one command, returns its status. It changes nothing on the host but that folder.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from archive import write_archive

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
CACHE = REPOSITORY / ".cache" / "rdma-vm"

# The usual clock, TSC, is measured at boot and wrong by a factor when this host is busy then.
KERNEL_OPTIONS = "console=ttyS0 quiet panic=-1 mitigations=off nokaslr clocksource=hpet no_timer_check random.trust_cpu=on"
# Of the host's environment, what a command inside may need; everything else is made anew.
ENVIRONMENT = ("PYTHONPATH", "PYTEST_ADDOPTS", "TERM")


class Unavailable(Exception):
    """There can be no such machine here; the text says why."""


@dataclass(frozen=True)
class Machine:
    """How it is built. `accelerator`: qemu's name for it."""

    kernel: Path
    archive: Path
    cores: int = 2
    memory_MiB: int = 3072
    accelerator: str = "tcg"
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, script: str, results: Path, timeout_s: float) -> int:
        """Runs a bash script inside, its output on our stdout. Its status, 124 past `timeout_s`, 125 when the machine failed."""
        results.mkdir(parents=True, exist_ok=True)
        (results / "status").unlink(missing_ok=True)
        (results / "place").write_text(str(results), encoding="utf-8")
        (results / "command").write_text(self._preamble() + script + "\n", encoding="utf-8")
        # The machine dies with us, however we die.
        child = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *self._qemu(results)], stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            if child.poll() is None:
                child.send_signal(signal.SIGKILL)
                child.wait()
        try:
            return int((results / "status").read_text(encoding="ascii"))
        except (OSError, ValueError):
            return 125

    def _preamble(self) -> str:
        variables = {
            "HOME": "/root",
            "LANG": "C.UTF-8",
            "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            **self.environment,
        }
        variables["PYTHONPATH"] = ":".join(filter(None, [str(CACHE / "python"), variables.get("PYTHONPATH", "")]))
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
        return f"{exports}cd {shlex.quote(str(REPOSITORY))}\n. tests/rdma/vm/devices.sh\nmake_devices || exit 125\n"

    def _qemu(self, results: Path) -> list[str]:
        def share(tag: str, path: Path, options: str = ",readonly=on") -> list[str]:
            source = f"local,id={tag},path={str(path).replace(',', ',,')},security_model=none,multidevs=remap{options}"
            return ["-fsdev", source, "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]

        accelerator = "tcg,thread=multi,tb-size=512" if self.accelerator == "tcg" else self.accelerator
        cpu = "max" if self.accelerator == "tcg" else "host"
        return [
            "qemu-system-x86_64", "-accel", accelerator, "-cpu", cpu, "-machine", "q35", "-smp", str(self.cores),
            "-m", str(self.memory_MiB), "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-nic", "none",
            "-kernel", str(next((self.kernel / "boot").glob("vmlinuz-*"))), "-initrd", str(self.archive),
            "-append", KERNEL_OPTIONS,
            "-chardev", f"file,id=log,path={results / 'console.log'}", "-serial", "chardev:log",
            "-chardev", "stdio,id=out,signal=off", "-device", "virtio-serial-pci", "-device", "virtconsole,chardev=out",
            "-device", "virtio-rng-pci",
            *share("host", Path("/")), *share("kernel", self.kernel), *share("results", results, ""),
        ]  # fmt: skip


def prepare(environment: dict[str, str]) -> Machine:
    """Installs and fetches what is missing, then describes the machine. Raises `Unavailable`."""
    made = subprocess.run([HERE / "prepare.sh", CACHE], capture_output=True, text=True, check=False)
    if made.returncode:
        said = made.stderr.strip().splitlines() or [f"prepare.sh ended with status {made.returncode}"]
        raise Unavailable(said[-1])
    sys.stderr.write(made.stderr)
    _check_verbs()
    kernel = Path(made.stdout.strip())
    archive = CACHE / f"{kernel.name}.initramfs"
    sources = (HERE / "init.sh", HERE / "archive.py")
    if not archive.exists() or archive.stat().st_mtime < max(path.stat().st_mtime for path in sources):
        write_archive(archive, kernel, HERE / "init.sh")
    return Machine(kernel, archive, environment=environment)


def _check_verbs() -> None:
    program = f"import sys; sys.path.append({str(CACHE / 'python')!r}); import pyverbs.device"
    tried = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if tried.returncode:
        version = ".".join(map(str, sys.version_info[:2]))
        raise Unavailable(f"this system's pyverbs can't be imported by Python {version}: {tried.stderr.strip().splitlines()[-1]}")
