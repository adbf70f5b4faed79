"""The house rules, enforced on the source itself: floors, sizes, docstrings, and what may not be imported or called.

Reads files with `ast`, imports nothing of the package. The floors are those of docs/architecture.md, which is compared too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pp1q_transport"
NAME = "pp1q_transport"

# The floor of every module, by its longest listed prefix. Lower never imports higher.
FLOORS: dict[int, tuple[str, ...]] = {
    0: ("errors", "memory", "counters"),
    1: ("_native",),
    2: ("rng", "dyadic", "verify", "sharding", "greedy", "admission"),
    3: ("wire",),
    4: ("session",),
    5: ("logs", "staging", "links", "local", "capture", "endpoints", "keys", "control_codec", "control_peers", "control"),
    6: ("engine", "forming", "seating"),
    7: ("client", "daemon"),
    8: ("toy", "qualify", "simulate"),
    9: ("cli",),
}
# The package itself re-exports the client's names; `python -m` starts at the roof.
ROOFLESS = {"": 7, "__main__": 9}

MAX_LINES = 500
MAX_FUNCTION_LINES = 60
# What was longer when the rule came in, at its exact size: it may shrink (then lower the number), never grow.
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}

# Modules a floor may not import at all, by prefix: what has no I/O and no clock of its own.
FORBIDDEN: dict[str, frozenset[str]] = {
    "session": frozenset({"socket", "select", "time", "random", "os", "io", "secrets", "threading", "asyncio", "zmq", "mmap"}),
    "wire": frozenset({"socket", "select", "time", "random", "os", "io", "threading", "asyncio", "zmq", "mmap", "pathlib"}),
    "dyadic": frozenset({"socket", "time", "random", "os", "io", "threading"}),
    "rng": frozenset({"socket", "time", "random", "os", "secrets", "io", "threading", "numpy"}),
    "verify": frozenset({"socket", "time", "random", "os", "io", "threading"}),
    "sharding": frozenset({"socket", "time", "random", "os", "io", "threading"}),
    "greedy": frozenset({"socket", "time", "random", "os", "io", "threading"}),
    "admission": frozenset({"socket", "time", "random", "os", "io", "threading", "numpy"}),
    "errors": frozenset({"socket", "time", "random", "os", "io", "threading", "numpy"}),
}
NOWHERE = frozenset({"pickle", "cPickle", "dill", "marshal", "shelve", "yaml", "imp", "telnetlib", "xmlrpc"})
NO_CALLS = frozenset({"eval", "exec", "compile", "__import__"})


def _modules() -> dict[str, Path]:
    """Dotted name below the package -> file; packages by their own name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()
TREES = {name: ast.parse(path.read_text(encoding="utf-8"), str(path)) for name, path in MODULES.items()}
ALL = pytest.mark.parametrize("name", sorted(MODULES), ids=lambda name: name or "(package)")


def floor_of(name: str) -> int | None:
    """The floor of a module, None when the table does not know it."""
    if name in ROOFLESS:
        return ROOFLESS[name]
    top = name.split(".")[0]
    return next((floor for floor, tops in FLOORS.items() if top in tops), None)


def _type_checking_only(tree: ast.Module) -> set[ast.AST]:
    """Every node under an `if TYPE_CHECKING:`."""
    nodes: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            nodes.update(inner for statement in node.body for inner in ast.walk(statement))
    return nodes


def _absolute(name: str, node: ast.ImportFrom) -> str:
    """What `from ... import` names, absolute."""
    if not node.level:
        return node.module or ""
    inside = name.split(".") if name else []
    if MODULES[name].name != "__init__.py":
        inside = inside[:-1]
    base = inside[: len(inside) - (node.level - 1)] if node.level > 1 else inside
    return ".".join([NAME, *base, *((node.module or "").split(".") if node.module else [])])


def imports_of(name: str, runtime_only: bool = False) -> Iterator[tuple[str, int]]:
    """(absolute dotted module, line) for everything a module imports."""
    tree = TREES[name]
    skipped = _type_checking_only(tree) if runtime_only else set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(name, node)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                below = inner.removeprefix(NAME + ".")
                yield (inner if inner.startswith(NAME) and below in MODULES else base), node.lineno


def ours(module: str) -> str | None:
    """The name below the package, None for anything else. Extension modules count as their package."""
    if module != NAME and not module.startswith(NAME + "."):
        return None
    below = module[len(NAME) + 1 :]
    while below and below not in MODULES:
        below = below.rpartition(".")[0]
    return below


@ALL
def test_every_module_stands_on_a_floor(name: str) -> None:
    assert floor_of(name) is not None, f"{name}: give it a floor in FLOORS and docs/architecture.md"


@ALL
def test_imports_go_down_only(name: str) -> None:
    mine = floor_of(name)
    assert mine is not None
    for module, line in imports_of(name):
        below = ours(module)
        if below is not None:
            theirs = floor_of(below)
            assert theirs is not None
            assert theirs <= mine, f"{name}:{line} (floor {mine}) imports {below} (floor {theirs})"


def test_nothing_imports_in_a_circle() -> None:
    edges = {
        name: {below for module, _ in imports_of(name, runtime_only=True) if (below := ours(module)) not in (None, "", name)}
        for name in MODULES
    }
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for following in sorted(edges[name]):
                visit(following, (*path, name))
            done.add(name)

    for name in sorted(MODULES):
        visit(name, ())


def test_the_documented_floors_are_these() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (\d+) \| (.*) \|$", text, re.MULTILINE))
    assert {int(floor) for floor in rows} == set(FLOORS)
    for floor, modules in FLOORS.items():
        named = re.sub(r"\([^)]*\)", "", rows[str(floor)])
        assert set(re.findall(r"`([^`]+)`", named)) == set(modules), f"floor {floor}"


@ALL
def test_a_floor_without_io_imports_none(name: str) -> None:
    banned = next((names for prefix, names in FORBIDDEN.items() if name == prefix or name.startswith(prefix + ".")), frozenset())
    for module, line in imports_of(name):
        top = module.split(".")[0]
        assert top not in banned, f"{name}:{line} imports {top}"
        assert top not in NOWHERE, f"{name}:{line} imports {top}"


@ALL
def test_nothing_evaluates_text(name: str) -> None:
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in NO_CALLS, f"{name}:{node.lineno} calls {node.func.id}"


@ALL
def test_no_bare_except(name: str) -> None:
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{name}:{node.lineno} has a bare except"


@ALL
def test_every_module_says_what_it_is(name: str) -> None:
    text = ast.get_docstring(TREES[name])
    assert text, f"{name} has no docstring"
    assert len(text.split("\n")[0]) <= 130


@ALL
def test_files_stay_small(name: str) -> None:
    lines = len(MODULES[name].read_text(encoding="utf-8").splitlines())
    limit = LONG_FILES.get(name)
    if limit is None:
        assert lines <= MAX_LINES, f"{name} has {lines} lines"
    else:
        assert lines == limit, f"{name} has {lines} lines, the ratchet says {limit}: lower it, or take it out"


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    for node in ast.iter_child_nodes(tree):
        inner = prefix
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{prefix}.{node.name}"
            if not isinstance(node, ast.ClassDef):
                assert node.end_lineno is not None
                yield inner, node.end_lineno - node.lineno + 1
        yield from _functions(node, inner)


@ALL
def test_functions_stay_small(name: str) -> None:
    for function, lines in _functions(TREES[name], name):
        limit = LONG_FUNCTIONS.get(function)
        if limit is None:
            assert lines <= MAX_FUNCTION_LINES, f"{function} has {lines} lines"
        else:
            assert lines == limit, f"{function} has {lines} lines, the ratchet says {limit}: lower it, or take it out"


def test_the_ratchet_names_what_exists() -> None:
    functions = {function for name in MODULES for function, _ in _functions(TREES[name], name)}
    assert set(LONG_FUNCTIONS) <= functions
    assert set(LONG_FILES) <= set(MODULES)


def test_hot_modules_do_not_import_cython() -> None:
    """The same source must run uncompiled: types live in the .pxd beside it."""
    hot = [path.with_suffix("") for path in PACKAGE.rglob("*.pxd") if path.with_suffix(".py").exists()]
    assert hot
    for path in hot:
        name = ".".join(path.relative_to(PACKAGE).parts)
        assert all(module.split(".")[0] != "cython" for module, _ in imports_of(name)), name
