"""What the RDMA machine saves its time by, on any host: forked processes that are to their programs what new ones would be, files
in its memory, bytecode from outside, a clock that is told its pace."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "vm"))

import archive
import bytecode
import clock
from lanes import Lane, run_lane
from processes import SERVER, Conversation, Forked, run, start

pytestmark = pytest.mark.timeout(60)
VM = Path(__file__).parent / "vm"
# The server as it is, less the imports, for which a host may have no pyverbs.
BARE = f"import sys; sys.path.insert(0, {str(VM)!r}); import warm; warm.import_all = lambda: None; warm.main()"


@contextlib.contextmanager
def fork_server(address: Path) -> Iterator[None]:
    command = [sys.executable, "-c", BARE, str(address)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        yield
        assert server.stdin is not None
        server.stdin.close()
        assert server.wait() == 0, "it ends with its input"


@pytest.fixture(params=("forked", "new"))
def kind(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """How processes are started within."""
    monkeypatch.delenv(SERVER, raising=False)
    if request.param == "new":
        yield "new"
        return
    with fork_server(tmp_path / "socket"):
        monkeypatch.setenv(SERVER, str(tmp_path / "socket"))
        yield "forked"


def program(folder: Path, text: str) -> str:
    path = folder / "program.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


ABOUT = """
import atexit, json, os, sys
atexit.register(print, "the end")
print(json.dumps([__name__, sys.argv, sys.path[0], os.getcwd(), os.environ["COLOUR"], "OTHER" in os.environ, sys.stdin.read()]))
print("aside", file=sys.stderr)
"""


def test_a_process_is_what_its_program_expects(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLOUR", "red")
    path = program(tmp_path, ABOUT)
    done = run([path, "one", "two"])
    assert done.returncode == 0, done.stderr
    said, end = done.stdout.splitlines()
    assert json.loads(said) == ["__main__", [path, "one", "two"], str(tmp_path), str(tmp_path), "red", False, ""]
    assert end == "the end"
    assert done.stderr == "aside\n"
    monkeypatch.setenv("COLOUR", "blue")
    monkeypatch.setenv("OTHER", "1")
    assert json.loads(run([path]).stdout.splitlines()[0])[4:6] == ["blue", True], "the environment is each process's own"


def test_a_module_runs_as_by_its_name(kind: str) -> None:
    done = run(["-m", "json.tool", "--help"])
    assert done.returncode == 0
    assert "usage" in done.stdout


@pytest.mark.parametrize(
    ("text", "status", "said"),
    (
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('words')", 1, "words"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
    ),
)
def test_a_process_ends_as_its_program_does(kind: str, tmp_path: Path, text: str, status: int, said: str) -> None:
    done = run([program(tmp_path, text)])
    assert done.returncode == status
    assert said in done.stderr
    if status:
        with pytest.raises(subprocess.CalledProcessError):
            run([program(tmp_path, text)], check=True)


def test_processes_do_not_share_their_chance(kind: str, tmp_path: Path) -> None:
    path = program(tmp_path, "import random; print(random.getrandbits(64))")
    assert run([path]).stdout != run([path]).stdout


def test_a_process_is_waited_for_and_killed(kind: str, tmp_path: Path) -> None:
    process = start([program(tmp_path, "import time; time.sleep(600)")], new_session=True)
    assert isinstance(process, Forked) is (kind == "forked")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    assert process.poll() is None
    while os.getsid(process.pid) != process.pid:
        time.sleep(0.001)
    process.kill()
    assert process.wait() == process.poll() == -signal.SIGKILL
    process.kill()  # of one that is gone: nothing


def test_a_conversation(kind: str, tmp_path: Path) -> None:
    text = "import sys\nfor line in sys.stdin:\n    print(line[::-1].strip(), flush=True)"
    talk = Conversation([program(tmp_path, text)], os.environ)
    for text in ("one", "two"):
        talk.input.write(text + "\n")
        assert talk.output.readline() == text[::-1] + "\n"
    talk.close()
    assert talk.process.returncode == -signal.SIGKILL


def test_a_forked_process_does_not_outlive_who_asked_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fork_server(tmp_path / "socket"):
        monkeypatch.setenv(SERVER, str(tmp_path / "socket"))
        child = start([program(tmp_path, "import time; time.sleep(600)")])
        assert isinstance(child, Forked)
        child._said.close()
        child._connection.close()
        while Path(f"/proc/{child.pid}").exists():
            time.sleep(0.001)
        assert run([program(tmp_path, "print(7)")]).stdout == "7\n", "and the server goes on"


def test_a_mutant_is_in_effect_in_its_lane_and_in_no_other(kind: str, tmp_path: Path) -> None:
    """Both lanes from one server, the mutant first."""
    text = 'import os\ndef test_it():\n    assert not os.environ["PP1Q_RDMA_MUTANT"], "IsolationBroken"\n'
    (tmp_path / "test_mutant.py").write_text(text, encoding="utf-8")
    tests = (str(tmp_path / "test_mutant.py"),)
    assert run_lane("mutant", Lane("of it", tests=tests, mutant="no-fence"), tmp_path)[0] == "PASS"
    assert run_lane("plain", Lane("of it", tests=tests), tmp_path)[0] == "PASS"


# ---- files, bytecode, clock -------------------------------------------------------------------------------------------


def entries(data: bytes) -> dict[str, tuple[int, int, bytes]]:
    """{name: (mode, time, content)} of an archive."""
    found, at = {}, 0
    while True:
        assert data[at : at + 6] == b"070701"
        fields = [int(data[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        name = data[at + 110 : at + 110 + fields[11] - 1].decode()
        at += -(-(110 + fields[11]) // 4) * 4
        if name == "TRAILER!!!":
            return found
        found[name] = (fields[1], fields[5], data[at : at + fields[6]])
        at += -(-fields[6] // 4) * 4


def test_files_keep_content_mode_and_time(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"12345")
    os.chmod(tmp_path / "a.py", 0o640)
    os.utime(tmp_path / "a.py", (1, 1_700_000_000))
    (tmp_path / "link").symlink_to("a.py")
    target = io.BytesIO(b"xyz")
    target.seek(3)
    os.mkfifo(tmp_path / "pipe")
    archive.write_files(target, (tmp_path / name for name in ("", "a.py", "gone", "pipe", "link")))
    found = entries(target.getvalue()[4:])
    assert found[f"files{tmp_path}/a.py"] == (stat.S_IFREG | 0o640, 1_700_000_000, b"12345")
    assert found[f"files{tmp_path}/link"][2] == b"a.py"
    assert stat.S_ISDIR(found[f"files{tmp_path}"][0])
    assert not {f"files{tmp_path}/{name}" for name in ("gone", "pipe")} & {*found}


def test_what_python_reads_is_taken_along_and_what_no_lane_reads_is_not(tmp_path: Path) -> None:
    for name in archive.WHOLE:
        (tmp_path / name).mkdir()
    for name in ("pp1q_transport/wire.py", "tests/test_it.py", "tests/.hidden", "tests/page.html"):
        (tmp_path / name).write_text("", encoding="utf-8")
    verbs = tmp_path / "verbs"
    verbs.symlink_to("pp1q_transport")
    paths = list(archive.host_files(tmp_path, verbs))
    assert len(paths) == len(set(paths))
    ours = {tmp_path / "pp1q_transport/wire.py", tmp_path / "tests/test_it.py", verbs}
    assert {Path(json.__file__), Path(pytest.__file__), *ours} <= {*paths}
    assert not {tmp_path / "tests/.hidden", tmp_path / "tests/page.html"} & {*paths}
    assert not [path for path in paths if "/site-packages/scipy/" in str(path)]
    places = {path: place for place, path in enumerate(paths)}
    assert all(places[path.parent] < places[path] for path in paths if path != Path("/")), "a folder before what is in it"


def test_bytecode_is_written_for_sources_and_for_tests_as_pytest_runs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(bytecode.sysconfig, "get_path", lambda name: str(tmp_path / "installed"))
    for folder in ("pp1q_transport", "tests/rdma", "tests/links", "tests/system", "tests/protocol", "installed"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("pp1q_transport/part.py", "installed/package.py"):
        (tmp_path / name).write_text("x = 1\n", encoding="utf-8")
    (tmp_path / "tests/rdma/test_part.py").write_text("def test_it():\n    assert True\n", encoding="utf-8")
    bytecode.write_bytecode(tmp_path, ["tests/rdma/test_part.py"], "")
    for name in ("pp1q_transport/part.py", "installed/package.py"):
        assert Path(importlib.util.cache_from_source(str(tmp_path / name))).exists()
    assert list((tmp_path / "tests/rdma/__pycache__").glob("test_part.*-pytest-*.pyc"))


def test_the_clock_is_told_only_a_pace_that_is_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "OVER_S", 0.0)
    for ticks, kHz in (((0, 2000, 4000), 2_000_000), ((0, 2000, 9000), None)):
        marks = iter(zip(ticks, (0, 1000, 2000), strict=True))
        monkeypatch.setattr(clock, "_mark", lambda read, marks=marks: next(marks))
        assert clock.measure_tsc_kHz() == kHz
    assert "clocksource=hpet" in clock.clock_options(None)
    told = clock.clock_options(2_000_000)
    assert "tsc_early_khz=2000000" in told
    assert "lpj=8000000" in told
