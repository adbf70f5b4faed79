"""Fixtures of the local package's tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_rig import Door


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, and open to other users, which pytest's own are not."""
    made = Path(tempfile.mkdtemp(prefix="pp1q-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def door(folder: Path) -> Iterator[Door]:
    made = Door(str(folder / "daemon.sock"), frozenset((os.getuid(),)))
    yield made
    made.close()
