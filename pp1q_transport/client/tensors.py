"""Slot memory for who computes with torch or CUDA: tensors over it without a copy, and its registration with the CUDA runtime.

Between the engine and libraries that this package neither needs nor imports by itself: torch is imported by the first call that
makes a tensor, the CUDA runtime is looked for by the first `pin`. Copies nothing (`copying` does). SPEC section 2.
"""

from __future__ import annotations

import ctypes
import importlib
import weakref
from dataclasses import dataclass
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..errors import ConfigError
from ..logs import logger
from ..staging import Region

if TYPE_CHECKING:
    import numpy.typing as npt

CUDART_NAMES: Final = ("libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0")
PORTABLE: Final = 1  # cudaHostRegisterPortable: pinned for every context of the process
READ_ONLY: Final = 8  # cudaHostRegisterReadOnly: without it memory that is mapped read-only can't be registered
ALREADY_REGISTERED: Final = 712


# ---- tensors ------------------------------------------------------------------------------------------------------------------


class _Unlocked:
    """An array's memory without its read-only flag, for torch, which knows no such flag; keeps the array alive."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def as_tensor(array: npt.NDArray[Any]) -> Any:
    """A torch tensor over the same memory. Raises `ConfigError` when torch is not installed.

    torch knows no read-only tensors: writing into one over a slot is undefined. Beside a daemon it ends the process (the slot is
    mapped read-only), embedded it changes the proposal. The memory stays mapped as long as the tensor lives, but what it holds
    is the next proposal's once this one is released.
    """
    try:
        torch: Any = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        raise ConfigError(f"tensors need torch, which can't be imported here ({error}): pip install torch") from error
    if not array.flags.writeable:
        array = np.asarray(_Unlocked(array))
    return torch.from_numpy(array)


def as_tensors(values: npt.NDArray[np.float32], ids: npt.NDArray[np.int32] | None) -> tuple[Any, Any]:
    """(values, ids) of a q as tensors; see `as_tensor`."""
    return as_tensor(values), None if ids is None else as_tensor(ids)


# ---- pinned memory ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Pinning:
    """What came of one `pin`: `pinned` says whether the device can copy without staging, `detail` how or why not."""

    address: int
    size: int
    pinned: bool
    detail: str
    register_ms: float = 0.0
    ours: bool = False
    _array: weakref.ref[npt.NDArray[Any]] | None = None

    def is_of(self, array: npt.NDArray[Any]) -> bool:
        """Whether it was made for this very array: another one may stand at its address by now."""
        return self._array is not None and self._array() is array

    def close(self) -> None:
        """Unregisters, if it was registered here. Safe to repeat; nothing may be copying from or to the memory."""
        if not self.ours:
            return
        self.ours = self.pinned = False
        self.detail = "unregistered"
        _pinned.pop(self.address, None)
        code = _runtime.unregister(self.address)
        if code:
            logger().warning("not_unregistered", address=self.address, bytes=self.size, detail=_runtime.name_of(code))


class _Runtime:
    """The CUDA runtime library of this process, once there is one."""

    def __init__(self) -> None:
        self._library: Any = None

    def find(self) -> str:
        """Looks for a runtime with a device. Empty when there is one, or why there is none."""
        if self._library is not None:
            return ""
        library = next(filter(None, map(_load, [*_loaded(), *CUDART_NAMES])), None)
        if library is None:
            return "no CUDA runtime library (libcudart) is loaded or can be found"
        library.cudaGetErrorName.restype = ctypes.c_char_p
        library.cudaHostRegister.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        library.cudaHostUnregister.argtypes = (ctypes.c_void_p,)
        count = ctypes.c_int(0)
        code = library.cudaGetDeviceCount(ctypes.byref(count))
        if code or count.value < 1:
            library.cudaGetLastError()
            name = library.cudaGetErrorName(code) or b"unknown"
            return f"the CUDA runtime has no device ({name.decode()})" if code else "the CUDA runtime has no device"
        self._library = library
        return ""

    def register(self, address: int, size: int, flags: int) -> int:
        """cudaHostRegister; 0 or the error. An error is not left behind for the engine's next call to find."""
        code = int(self._library.cudaHostRegister(address, size, flags))
        if code:
            self._library.cudaGetLastError()
        return code

    def unregister(self, address: int) -> int:
        """cudaHostUnregister; 0 or the error, which is not left behind either."""
        code = int(self._library.cudaHostUnregister(address))
        if code:
            self._library.cudaGetLastError()
        return code

    def name_of(self, code: int) -> str:
        """The name of an error."""
        return bytes(self._library.cudaGetErrorName(code) or b"unknown").decode()


_runtime = _Runtime()
_pinned: dict[int, Pinning] = {}  # by address: what is registered here and now


def _load(name: str) -> Any:
    try:
        return ctypes.CDLL(name)
    except OSError:  # not here; the next name may be
        return None


def _loaded() -> list[str]:
    """The CUDA runtime that this process has loaded already (torch brings its own): another one beside it is a waste."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "libcudart" in line}
    return sorted(paths)


def pin(memory: Region | npt.NDArray[Any]) -> Pinning:
    """Registers memory with the CUDA runtime, so that the device copies from and to it directly (cudaHostRegister; read-only
    where the map is). Once: asked again for memory that is registered, it gives the same answer.

    `memory`: a region of a side (`on_memory(pin)` pins them all), unregistered when the side closes it; or an array that owns
    its pages, such as a copy stage's `view` on the draft side, unregistered when it goes. Without CUDA this does nothing but
    say so. Never raises for what the runtime says: see `detail`.
    """
    array = memory.array if isinstance(memory, Region) else memory
    address, size = array.ctypes.data, array.nbytes
    known = _pinned.get(address)
    if known is not None:
        if known.is_of(array):
            return known
        known.close()
    made = _register(address, size, not array.flags.writeable)
    if made.ours:
        made._array = weakref.ref(array)
        _pinned[address] = made
        if isinstance(memory, Region):
            memory.at_close.append(made.close)
        else:
            weakref.finalize(memory, made.close).atexit = False  # the runtime itself may be gone by then
    logger().info("pin", pinned=made.pinned, detail=made.detail, bytes=size, register_ms=round(made.register_ms, 2))
    return made


def _register(address: int, size: int, read_only: bool) -> Pinning:
    missing = _runtime.find()
    if missing:
        return Pinning(address, size, False, f"not pinned: {missing}")
    started_ns = monotonic_ns()
    code = _runtime.register(address, size, PORTABLE | (READ_ONLY if read_only else 0))
    register_ms = (monotonic_ns() - started_ns) / 1e6
    kind = " read-only" if read_only else ""
    if code == ALREADY_REGISTERED:
        return Pinning(address, size, True, "registered already, by somebody else", register_ms)
    if code:
        return Pinning(address, size, False, f"not pinned: cudaHostRegister{kind} says {_runtime.name_of(code)}", register_ms)
    return Pinning(address, size, True, f"registered{kind}", register_ms, ours=True)


__all__ = ["Pinning", "as_tensor", "as_tensors", "pin"]
