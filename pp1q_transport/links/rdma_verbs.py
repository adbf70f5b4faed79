"""The verbs library as this package uses it: the only module that imports pyverbs, and the only one that knows its quirks.

Between `rdma_connection` and Debian's python3-pyverbs, which is loaded when an rdma link is asked for and not before. A pyverbs
object crashes the process when it is used after its end or in a forked child, so each lives inside one object here that refuses
both. Owns no protocol: who writes where, and when a key is revoked, is decided above.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.machinery
import importlib.util
import mmap
import os
import sys
import sysconfig
import weakref
from typing import Any, Final, TypeVar

from ..errors import ConfigError, LocalMisuse

FOLDERS: Final = (
    "/usr/lib/python3/dist-packages",  # Debian and Ubuntu
    f"/usr/lib64/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages",  # Fedora and its kin
)
INSTALL: Final = "install python3-pyverbs and ibverbs-providers (Debian), for the interpreter that runs this"
PARTS: Final = ("device", "pd", "mr", "cq", "qp", "wr", "addr", "enums", "pyverbs_error")
EVENT_FILE: Final = "anon_inode:[infinibandevent]"
alive: Final[dict[str, int]] = {"context": 0, "pd": 0, "mr": 0, "channel": 0, "cq": 0, "qp": 0}
"""How many of each this process holds: what leaks, a test sees."""


class Library:
    """pyverbs, its modules as attributes. One in a process."""

    def __init__(self, modules: dict[str, Any]) -> None:
        self.device = modules["device"]
        self.pd = modules["pd"]
        self.mr = modules["mr"]
        self.cq = modules["cq"]
        self.qp = modules["qp"]
        self.wr = modules["wr"]
        self.addr = modules["addr"]
        self.enums = modules["enums"]
        self.Error: type[Exception] = modules["pyverbs_error"].PyverbsError
        e = self.enums
        self.local_write: int = e.IBV_ACCESS_LOCAL_WRITE
        self.remote_write: int = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
        self.row_received: int = e.IBV_WC_RECV_RDMA_WITH_IMM


_library: Library | None = None


def load() -> Library:
    """pyverbs, looked for where any import looks and then where distributions put it; nothing else of that folder is reached.
    Raises `ConfigError` that says what to install."""
    global _library
    if _library is None:
        try:
            _find_package()
            _library = Library({part: importlib.import_module(f"pyverbs.{part}") for part in PARTS})
        except ImportError as error:
            raise ConfigError(f"link rdma needs pyverbs: {_why(error)}") from None
    return _library


def _find_package() -> None:
    if importlib.util.find_spec("pyverbs") is not None:
        return
    spec = importlib.machinery.PathFinder.find_spec("pyverbs", list(FOLDERS))
    if spec is None or spec.loader is None:
        raise ImportError(INSTALL)
    module = importlib.util.module_from_spec(spec)
    sys.modules["pyverbs"] = module
    spec.loader.exec_module(module)


def _why(error: ImportError) -> str:
    """What to do about an import that failed: a pyverbs for another interpreter has no module that this one could load."""
    package = sys.modules.get("pyverbs")
    folder = os.path.dirname(getattr(package, "__file__", None) or "")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    if folder and not os.path.exists(os.path.join(folder, f"cq{suffix}")):
        return f"{folder} is not for this interpreter (no cq{suffix} there): use the Python that it was built for"
    return str(error)


def device_names() -> list[str]:
    """The RDMA devices of this host, by name. Raises `ConfigError` without pyverbs."""
    library = load()
    try:
        found = library.device.get_device_list()
        return sorted(item.name.decode() if isinstance(item.name, bytes) else item.name for item in found)
    except library.Error:  # no kernel module, no /sys/class/infiniband
        return []


# ---- one process only ---------------------------------------------------------------------------------------------

H = TypeVar("H", bound="Holder")
_held: weakref.WeakSet[Holder] = weakref.WeakSet()


class Holder:
    """Owns verbs objects of this process. After a fork the child has copies of them that work on the parent's own: it must not
    even free them, so `_disown` keeps them for ever and every use raises `LocalMisuse`."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._objects: list[tuple[str, Any]] = []
        self._parts: weakref.WeakSet[Holder] = weakref.WeakSet()
        self.closed = False
        self.refused = False
        _held.add(self)

    @property
    def foreign(self) -> bool:
        """Whether this is a forked child, whose copies of another process's objects these are."""
        return os.getpid() != self._pid

    def _own(self, kind: str, thing: Any) -> Any:
        self._objects.append((kind, thing))
        alive[kind] += 1
        return thing

    def _part(self, part: H) -> H:
        """Remembers what is made in this, and must go before it."""
        self._parts.add(part)
        return part

    def check(self) -> None:
        """Raises `LocalMisuse` in a forked child and after the end."""
        if self.foreign:
            raise LocalMisuse("an rdma link was used in a forked child: start processes with spawn, or before links exist")
        if self.closed:
            raise LocalMisuse("an rdma link was used after its end")

    def _drop(self, kind: str, thing: Any) -> None:
        """Frees one object now. Raises pyverbs' error when the kernel refuses, and still owns it then."""
        thing.close()
        self._objects = [(name, other) for name, other in self._objects if other is not thing]
        alive[kind] -= 1

    def close(self) -> None:
        """Frees everything, what was made in it and last first; safe to repeat, and in a child does nothing. What the kernel
        refuses to free stays owned by `_refused` for as long as the process runs: freeing its memory would be worse."""
        if self.closed or self.foreign:
            self.closed = True
            return
        for part in list(self._parts):
            part.close()
        self.closed = True
        error = load().Error
        for kind, thing in reversed(self._objects):
            try:
                thing.close()
                alive[kind] -= 1
            except error:
                self.refused = True
                _refused.append((self, thing))
        self._objects.clear()


_refused: list[object] = []


def _disown() -> None:
    """In a forked child: no destructor of these objects may ever run here."""
    for holder in list(_held):
        holder.closed = True
        for _kind, thing in holder._objects:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


os.register_at_fork(after_in_child=_disown)


# ---- memory ---------------------------------------------------------------------------------------------------------


class SharedMemory:
    """Zeroed, faulted-in bytes that a device may be told of. Shared pages, so that a fork of the process, which must not touch
    the link, can't move them away under the device either. Freed when the last view of it is gone."""

    def __init__(self, size: int) -> None:
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
        try:
            self.map = mmap.mmap(-1, max(size, 1), flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            raise ConfigError(f"can't get {size} bytes for an rdma link: {error.strerror}") from None
        self.size = size
        self.view = memoryview(self.map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
