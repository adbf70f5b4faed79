"""The package's native build: small C kernels, their bindings, and the hot modules compiled from their own .py files.

A module is hot when a .pxd of the same name stands beside it: the .py stays importable without compilation (tests run
both ways), the .pxd only adds C types. No machine-specific flags; kernels choose their instruction set at run time.
"""

from __future__ import annotations

import os
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

ROOT = Path(__file__).parent
PACKAGE = Path("pp1q_transport")
NATIVE = PACKAGE / "_native"
# -ffp-contract=off: a fused multiply-add would make counts differ between x86-64 and aarch64.
CFLAGS = ["-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-g0"]
DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "initializedcheck": False,
    "nonecheck": True,  # a None where an object belongs raises, as in Python, instead of reading beyond None's own memory
    "cdivision": True,
    "annotation_typing": False,  # types come from the .pxd alone; annotations are for mypy
    "binding": True,
}


def extensions() -> list[Extension]:
    # C sources of the two extensions that have any, by name: pp1q_*.c are payload kernels, net_*.c socket loops.
    sources = {
        stem: sorted(str(path.relative_to(ROOT)) for path in (ROOT / NATIVE).glob(pattern))
        for stem, pattern in (("kernels", "pp1q_*.c"), ("net", "net_*.c"))
    }
    built = [
        Extension(
            "pp1q_transport._native." + path.stem,
            [str(path.relative_to(ROOT)), *sources.get(path.stem, [])],
            include_dirs=[str(NATIVE)],
            depends=[str(header.relative_to(ROOT)) for header in (ROOT / NATIVE).glob("*.h")],
            extra_compile_args=CFLAGS,
        )
        for path in sorted((ROOT / NATIVE).glob("*.pyx"))
    ]
    for pxd in sorted((ROOT / PACKAGE).rglob("*.pxd")):
        source = pxd.with_suffix(".py").relative_to(ROOT)
        if (ROOT / source).exists():
            name = ".".join(source.with_suffix("").parts)
            built.append(Extension(name, [str(source)], include_dirs=[str(NATIVE)], extra_compile_args=CFLAGS))
    return built


setup(
    ext_modules=cythonize(extensions(), build_dir="build/cython", compiler_directives=DIRECTIVES),
    options={"build_ext": {"parallel": os.cpu_count()}},
)
