"""A throw-away machine with Soft-RoCE: QEMU without KVM, the host's own files inside, one folder to write to.

Between `run.py` and qemu. Boots, runs one command, returns its status. It changes nothing on the host but that folder.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from archive import host_files, write_archive, write_files
from clock import clock_options, measure_tsc_kHz

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
CACHE = REPOSITORY / ".cache" / "rdma-vm"

KERNEL_OPTIONS = (
    "console=ttyS0 quiet panic=-1 nokaslr no_timer_check random.trust_cpu=on "
    # What guards a machine that has something to guard costs an emulated one a third of its time, zeroing pages before all.
    "mitigations=off init_on_alloc=0 hardened_usercopy=off randomize_kstack_offset=off lsm= audit=0 cgroup_disable=memory "
    "preempt=none nowatchdog clearcpuid=rep_good "
    # One processor until all devices are there. Booting, Linux changes its own code, and an emulated processor that translates
    # the very instruction meanwhile can keep the breakpoint that stood there for a moment: a panic, once in ten boots.
    "maxcpus=1 noreplace-smp"
)
# Everything that qemu can emulate, less what it can only do slowly: vectors, string instructions of bytes, a fifth level of page
# tables, checks at each way into the kernel. Kernel, libc, numpy and this package choose other ways when they find it missing.
WITHOUT = ("avx", "avx2", "xsave", "erms", "fsrm", "la57", "smap", "smep", "umip", "pku")
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
        with tempfile.TemporaryFile(dir=CACHE) as archive:  # without a name: nothing is left of it, however we end
            archive.write(self.archive.read_bytes())
            write_files(archive, host_files(REPOSITORY, CACHE / "python" / "pyverbs"))
            archive.flush()
            # The machine dies with us, however we die.
            descriptor = archive.fileno()
            command = ["setpriv", "--pdeathsig", "KILL", *self._qemu(results, Path(f"/proc/self/fd/{descriptor}"))]
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(descriptor,), start_new_session=True)
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

    @property
    def python_path(self) -> str:
        """PYTHONPATH inside."""
        return ":".join(filter(None, [str(CACHE / "python"), self.environment.get("PYTHONPATH", "")]))

    def _preamble(self) -> str:
        variables = {
            "HOME": "/root",
            "LANG": "C.UTF-8",
            "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OPENBLAS_NUM_THREADS": "1",  # its threads would only wait
            **self.environment,
        }
        variables["PYTHONPATH"] = self.python_path
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
        devices = ". tests/rdma/vm/devices.sh\nmake_devices && all_processors || exit 125\n"
        return f"{exports}cd {shlex.quote(str(REPOSITORY))}\n{devices}"

    def _qemu(self, results: Path, archive: Path) -> list[str]:
        def share(tag: str, path: Path, options: str = ",readonly=on") -> list[str]:
            source = f"local,id={tag},path={str(path).replace(',', ',,')},security_model=none,multidevs=remap{options}"
            return ["-fsdev", source, "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]

        accelerator = "tcg,thread=multi,tb-size=512" if self.accelerator == "tcg" else self.accelerator
        cpu = ",-".join(("max", *WITHOUT)) if self.accelerator == "tcg" else "host"
        return [
            "qemu-system-x86_64", "-accel", accelerator, "-cpu", cpu, "-machine", "q35", "-smp", str(self.cores),
            "-m", str(self.memory_MiB), "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-nic", "none",
            "-kernel", str(next((self.kernel / "boot").glob("vmlinuz-*"))), "-initrd", str(archive),
            "-append", f"{KERNEL_OPTIONS} {clock_options(measure_tsc_kHz())}",
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
