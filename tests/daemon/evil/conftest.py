"""Puts the rig of the daemons' tests, and the protocol's cases, on the path."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2]), str(Path(__file__).parent)]
