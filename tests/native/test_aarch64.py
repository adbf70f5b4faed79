"""The same vectors through the C kernels on x86-64 (every level this CPU has) and on aarch64 (cross-built, emulated).

A host without the cross compiler or the emulator skips the second part by name; with PP1Q_REQUIRE_AARCH64=1 in the
environment, as in CI, that is a failure instead.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import kernel_vectors
import pytest

from pp1q_transport._native import kernels

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "pp1q_transport" / "_native"
CFLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")
MISSING = "aarch64 toolchain or qemu-user missing"
CROSS = "aarch64-linux-gnu-gcc"


def build(compiler: str, out: Path, *flags: str) -> Path:
    sources = [str(HERE / "kernel_vectors.c"), *map(str, sorted(NATIVE.glob("pp1q_*.c")))]
    command = [compiler, *CFLAGS, *WARNINGS, *flags, f"-I{NATIVE}", *sources, "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return out


def check(command: list[str], records: dict[str, int]) -> dict[str, dict[str, int]]:
    """Runs the driver; every kernel must have passed all its records. Returns {level: {kernel: passed}}."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    passed: dict[str, dict[str, int]] = {}
    for line in done.stdout.splitlines():
        level, kernel, good, failed = line.split()
        assert failed == "failed=0", line
        passed.setdefault(level, {})[kernel] = int(good.removeprefix("passed="))
    for level, by_kernel in passed.items():
        assert by_kernel == {**records, **({"tree": 0} if level.endswith("+flush") else {})}
    return passed


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    path = tmp_path_factory.mktemp("vectors") / "kernels.bin"
    return path, kernel_vectors.write(path)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("gcc", tmp_path_factory.mktemp("native") / "driver")


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that runs the aarch64 driver here."""
    found = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if shutil.which(CROSS) is None or found is None:
        assert os.environ.get("PP1Q_REQUIRE_AARCH64") != "1", MISSING
        pytest.skip(MISSING)
    folder = tmp_path_factory.mktemp("aarch64")
    return [found, str(build(CROSS, folder / "driver", "-static", f"-I{xxhash_only(folder)}"))]


def xxhash_only(folder: Path) -> Path:
    """A folder that holds the host's xxhash.h and nothing else: the header is all the kernels need, on any target."""
    for candidate in (Path("/usr/include/xxhash.h"), Path("/usr/local/include/xxhash.h")):
        if candidate.exists():
            shutil.copy(candidate, folder / "xxhash.h")
            return folder
    pytest.fail("xxhash.h is missing: install libxxhash-dev")


def test_every_kernel_has_vectors(vectors: tuple[Path, dict[str, int]]) -> None:
    assert all(count > 0 for count in vectors[1].values())


@pytest.mark.parametrize("mode", ("", "flush"))
def test_native_levels(driver: Path, vectors: tuple[Path, dict[str, int]], mode: str) -> None:
    passed = check([str(driver), str(vectors[0]), "all", *mode.split()], vectors[1])
    assert [name.removesuffix("+flush") for name in passed] == list(kernels.levels())


@pytest.mark.skipif(platform.machine() == "aarch64", reason="this host is aarch64: test_native_levels covers it")
@pytest.mark.parametrize("mode", ("", "flush"))
def test_aarch64(emulated: list[str], vectors: tuple[Path, dict[str, int]], mode: str) -> None:
    passed = check([*emulated, str(vectors[0]), "all", *mode.split()], vectors[1])
    assert len(passed) == 1


@pytest.mark.slow
def test_native_levels_under_sanitizers(tmp_path: Path, vectors: tuple[Path, dict[str, int]]) -> None:
    """Undefined behaviour and reads beyond a row, in the driver's exact-sized allocations."""
    flags = ("-O1", "-g", "-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all")
    check([str(build("gcc", tmp_path / "driver", *flags)), str(vectors[0]), "all"], vectors[1])


def test_a_wrong_answer_is_noticed(driver: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.bin"
    record = kernel_vectors.record("hash64", [0, 1], b"abc")
    wrong.write_bytes(b"PP1QVEC1" + (1).to_bytes(8, "little") + record)
    done = subprocess.run([str(driver), str(wrong), "base"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "record 0 of hash64 differs" in done.stdout
