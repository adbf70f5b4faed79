"""Lets these tests use the world and frames of `tests/protocol`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
