"""Bytecode for the machine, written by the host: inside, files are read-only, and each process would compile all that it imports.

Between `machine.py` and the interpreter, which is the same inside and outside. What can't be written is compiled inside, as ever.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

NOT_INSIDE = r"/(scipy|mypy|mypyc|ruff|pip|setuptools|pkg_resources|tests)/"  # of the installed packages


def _python(arguments: Sequence[str], folder: Path, path: str) -> None:
    unwanted = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTEST_ADDOPTS")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted} | {"PYTHONPATH": path}
    subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, check=False)


def write_bytecode(repository: Path, tests: Sequence[str], path: str) -> None:
    """For the package, the tests' helpers and what is installed; then, by pytest itself, for `tests` with their assertions
    rewritten, which have bytecode of their own. `path`: PYTHONPATH as it is inside."""
    compile_all = ("-m", "compileall", "-q")
    _python([*compile_all, "pp1q_transport", "tests/rdma", "tests/links", "tests/system", "tests/protocol"], repository, path)
    _python([*compile_all, "-x", NOT_INSIDE, sysconfig.get_path("purelib")], repository, path)
    if tests:
        options = ("-q", "--collect-only", "-p", "no:cacheprovider")
        _python(["-m", "pytest", *options, *tests], repository, path)
