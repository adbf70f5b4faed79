"""Tensors over slots without a copy, memory registered with the CUDA runtime: with stand-ins always, with torch where it is."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import shutil
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_rig import DEPTH, PROMPT, Pair, draft, new_id
from fake_device import FakeDevice
from numpy.testing import assert_array_equal

from pp1q_transport.client import AttachedReceiver, tensors
from pp1q_transport.client.tensors import PORTABLE, READ_ONLY, as_tensor, pin
from pp1q_transport.errors import ConfigError, Reason
from pp1q_transport.staging import Region

pytestmark = pytest.mark.timeout(60)
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
HERE = Path(__file__).parent


# ---- tensors ------------------------------------------------------------------------------------------------------------------


class FakeTensor:
    """What torch makes of an array: it shares the memory and keeps the array."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)


def from_numpy(array: Any) -> FakeTensor:
    """As torch does: warns of an array that is read-only."""
    if not array.flags.writeable:
        warnings.warn("The given NumPy array is not writable", UserWarning, stacklevel=2)
    return FakeTensor(array)


@pytest.fixture
def fake_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = types.ModuleType("torch")
    torch.from_numpy = from_numpy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)


@pytest.mark.usefixtures("fake_torch")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("support", (None, 16), ids=["dense", "sparse"])
def test_tensors_share_the_slot(sides: Pair, support: int | None) -> None:
    with sides.ready(sides.receiver.open_request(new_id(), PROMPT), support=support).wait() as proposal:
        for index in range(DEPTH):
            q = proposal.q(index)
            values, ids = q.torch()
            assert values.data_ptr() == q.values.ctypes.data
            assert_array_equal(values.array, q.values)
            assert values.array.dtype == np.float32
            assert (ids is None) == (q.ids is None)
            if q.ids is not None:
                assert ids.data_ptr() == q.ids.ctypes.data
                assert_array_equal(ids.array, q.ids)
            assert not q.values.flags.writeable, "the views themselves stay read-only"


@pytest.mark.usefixtures("fake_torch")
def test_a_tensor_keeps_its_memory(attached: Pair) -> None:
    """The side is closed and everything else dropped: the tensor's memory is still mapped."""
    proposal = attached.ready(attached.receiver.open_request(new_id(), PROMPT)).wait()
    want = proposal.q(0).values.copy()
    values, _ids = proposal.q(0).torch()
    attached.close()
    attached.receiver = attached.leader  # type: ignore[assignment]
    del proposal
    gc.collect()
    assert_array_equal(values.array, want)


def test_without_torch_it_says_so(embedded: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with (
        embedded.ready(embedded.receiver.open_request(new_id(), PROMPT)).wait() as proposal,
        pytest.raises(ConfigError, match="pip install torch"),
    ):
        proposal.q(0).torch()


def test_nothing_here_imports_torch_by_itself() -> None:
    code = "import sys, pp1q_transport.client.tensors, pp1q_transport.client.copying; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@needs_torch
@pytest.mark.parametrize("support", (None, 16), ids=["dense", "sparse"])
def test_real_tensors(sides: Pair, support: int | None) -> None:
    import torch

    with (
        sides.ready(sides.receiver.open_request(new_id(), PROMPT), support=support).wait() as proposal,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        q = proposal.q(0)
        values, ids = q.torch()
        assert (values.dtype, values.data_ptr()) == (torch.float32, q.values.ctypes.data)
        assert float(values.double().sum()) == 1.0
        assert_array_equal(values.numpy(), q.values)
        if q.ids is not None:
            assert (ids.dtype, ids.tolist()) == (torch.int32, q.ids.tolist())
        tokens = as_tensor(proposal.tokens)
        assert tokens.tolist() == proposal.tokens.tolist()


# ---- pinned memory ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cudart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in, compiled."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in of the CUDA runtime")
    library = tmp_path_factory.mktemp("cuda") / "fake_rt.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(HERE / "fake_cudart.c")], check=True, timeout=60)
    return library


@pytest.fixture
def runtime(cudart: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in as the only runtime there is, with one device."""
    monkeypatch.setattr(tensors, "CUDART_NAMES", (str(cudart),))
    monkeypatch.setattr(tensors, "_loaded", list)
    monkeypatch.setattr(tensors, "_runtime", tensors._Runtime())
    monkeypatch.setattr(tensors, "_pinned", {})
    library = ctypes.CDLL(str(cudart))
    library.fake_size.restype = ctypes.c_size_t
    library.fake_address.restype = ctypes.c_void_p
    library.fake_set(1, 0)
    assert library.fake_registered() == 0
    yield library
    assert library.fake_last_error() == 0, "an error was left behind for the engine's next call"
    library.cudaGetLastError()


def test_a_region_is_registered_once(runtime: Any) -> None:
    region = Region(8192)
    first = pin(region)
    assert (first.pinned, first.ours, first.detail) == (True, True, "registered")
    assert (runtime.fake_flags(), runtime.fake_size(), runtime.fake_address()) == (PORTABLE, 8192, region.array.ctypes.data)
    before = runtime.fake_calls()
    assert pin(region) is first
    assert (runtime.fake_calls(), runtime.fake_registered()) == (before, 1)
    region.close()
    region.close()
    assert runtime.fake_registered() == 0
    assert (first.pinned, first.detail) == (False, "unregistered")
    first.close()


def test_a_read_only_map_is_registered_as_such(runtime: Any, attached: Pair) -> None:
    assert isinstance(attached.receiver, AttachedReceiver)
    region = attached.receiver.regions[0]
    made = pin(region)
    assert (made.pinned, made.detail, runtime.fake_flags()) == (True, "registered read-only", PORTABLE | READ_ONLY)
    attached.receiver.close()
    assert runtime.fake_registered() == 0


REFUSALS = (
    ("no device", 0, 0, "has no device"),
    ("no driver", -1, 0, "cudaErrorInsufficientDriver"),
    ("not supported", 1, 801, "cudaHostRegister says cudaErrorNotSupported"),
    ("unnamed", 1, 999, "cudaHostRegister says unknown"),
)


@pytest.mark.parametrize(("devices", "error", "text"), [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS])
def test_what_the_runtime_refuses_is_told(runtime: Any, devices: int, error: int, text: str) -> None:
    runtime.fake_set(devices, error)
    region = Region(4096)
    made = pin(region)
    assert not made.pinned
    assert text in made.detail
    runtime.fake_set(1, 0)
    assert pin(region).pinned, "asked again, it is tried again"
    region.close()
    assert runtime.fake_registered() == 0


def test_memory_that_somebody_else_registered_stays_theirs(runtime: Any) -> None:
    runtime.fake_set(1, 712)
    region = Region(4096)
    made = pin(region)
    assert (made.pinned, made.ours) == (True, False)
    region.close()
    made.close()
    assert made.pinned


def test_an_array_is_unregistered_when_it_goes(runtime: Any) -> None:
    array = np.zeros(1024)
    assert pin(array).pinned
    assert runtime.fake_registered() == 1
    del array
    gc.collect()
    assert runtime.fake_registered() == 0


def test_another_region_at_the_address_of_one_that_was_dropped(runtime: Any) -> None:
    """Dropped without a close: its entry must not be taken for the next one's."""
    region = Region(1 << 20)
    first = pin(region)
    os.close(region.fd)
    del region
    gc.collect()
    other = Region(1 << 20)
    if other.array.ctypes.data != first.address:
        first.close()
        pytest.skip("the kernel put the next region elsewhere")
    made = pin(other)
    assert made is not first
    assert (made.pinned, made.detail) == (True, "registered")
    assert runtime.fake_registered() == 1
    other.close()
    assert runtime.fake_registered() == 0


def test_without_a_runtime_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "CUDART_NAMES", ("libcudart-of-nobody.so.1",))
    monkeypatch.setattr(tensors, "_loaded", list)
    monkeypatch.setattr(tensors, "_runtime", tensors._Runtime())
    region = Region(4096)
    made = pin(region)
    assert not made.pinned
    assert "no CUDA runtime library" in made.detail
    region.close()
    made.close()


def test_a_runtime_that_is_loaded_already_is_found(cudart: Path, tmp_path: Path) -> None:
    copy = shutil.copy(cudart, tmp_path / "libcudart.so.99")
    assert str(copy) not in tensors._loaded()
    ctypes.CDLL(str(copy))
    assert str(copy) in tensors._loaded()


@pytest.mark.usefixtures("runtime")
def test_every_region_of_a_side_is_told_of(embedded: Pair) -> None:
    told: list[Region] = []
    embedded.receiver.on_memory(told.append)
    embedded.leader.on_memory(told.append)
    assert told == [embedded.receiver.region, embedded.leader.region]  # type: ignore[union-attr]
    embedded.close()
    assert embedded.receiver.regions == embedded.leader.regions == []


@pytest.mark.usefixtures("runtime")
def test_memory_of_the_next_daemon_is_told_of(attached: Pair) -> None:
    """Found anew, the daemon's memory is mapped anew: the old registration ends, the new map is registered."""
    told: list[Region] = []
    receiver, leader = attached.receiver, attached.leader
    assert isinstance(receiver, AttachedReceiver)
    for side in (receiver, leader):
        side.on_memory(told.append)
    assert len(told) == 2
    receiver._lose(Reason.PEER_LOST)
    assert receiver.regions == []
    attached.until(lambda: receiver.up)
    assert len(told) == 3
    assert told[2] is receiver.regions[0]


def test_memory_that_a_device_still_reads_stays_registered(runtime: Any, sides: Pair) -> None:
    device = FakeDevice(after=None)
    receiver = sides.receiver
    receiver.on_memory(pin)
    receiver.use_copy_stage(device)
    receiver.enqueue(receiver.open_request(new_id(), PROMPT), budget_us=20_000_000)
    draft(sides.next_step())
    sides.until(lambda: len(device.copies) == DEPTH)
    sides.close()
    assert runtime.fake_registered() == 1
    runtime.cudaHostUnregister(ctypes.c_void_p(runtime.fake_address()))
