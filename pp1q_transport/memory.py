"""Names for the byte memory that hot modules and kernels pass around.

Contiguous uint8, addressed by (memory, offset, length). Nothing is defined here but the two aliases.
"""

from __future__ import annotations

from typing import TypeAlias

Memory: TypeAlias = bytearray | memoryview
"""Writable bytes: a slot region, a ring, a scratch buffer."""

ReadMemory: TypeAlias = bytes | bytearray | memoryview
"""Bytes to read only."""
