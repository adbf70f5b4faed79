# C types of watchdog.py in the compiled build.
cimport cython
from libc.stdint cimport int64_t


cdef int64_t _NEVER


cdef class Watchdog:
    cdef public int count
    cdef public int64_t[::1] deadlines
    cdef public int64_t next_ns
    cpdef arm(self, int slot, int64_t deadline_ns)
    cpdef disarm(self, int slot)
    @cython.locals(best=int64_t, at=int64_t, index=int)
    cdef _refresh(self)
    cpdef list expired(self, int64_t now_ns)
