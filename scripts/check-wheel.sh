#!/usr/bin/env bash
# Builds dist/ (wheel.sh), then uses the wheel as a host without a compiler would: an empty environment, nothing else on the PATH.
set -euo pipefail
cd "$(dirname "$0")/.."
repo=$PWD
scripts/wheel.sh
wheel=$(ls dist/*.whl) sdist=$(ls dist/*.tar.gz)
room=$(mktemp -d)
system_path=$PATH
trap 'PATH=$system_path; rm -rf "$room"' EXIT
say() { printf '%-5s %-22s %s\n' "$1" "$2" "${3:-}"; }
stop() { say FAIL "$@"; exit 1; }

case $wheel in *-manylinux*) say PASS "wheel's tag" "$(basename "$wheel")" ;; *) stop "wheel's tag" "$wheel is tied to this host" ;; esac

# Every source of the build is in the sdist, nothing built is.
tar -tzf "$sdist" | sed 's#^[^/]*/##' | sort >"$room/sdist"
{ git ls-files pp1q_transport include 2>/dev/null || find pp1q_transport -type f -not -name '*.so' -not -path '*/__pycache__/*'; } | sort >"$room/tracked"
missing=$(comm -23 "$room/tracked" "$room/sdist")
[ -z "$missing" ] || stop "sdist's sources" "missing: $missing"
for file in setup.py pyproject.toml README.md LICENSE; do grep -qx "$file" "$room/sdist" || stop "sdist's sources" "missing: $file"; done
! grep -E '\.(so|o|pyc)$' "$room/sdist" || stop "sdist's sources" "holds built files"
say PASS "sdist's sources" "$(wc -l <"$room/tracked") files of the package"

python=${PYTHON:-python3}
[ -x .venv/bin/python ] && python=.venv/bin/python
"$python" -m venv "$room/venv"
unset PYTHONPATH
export PATH=$room/venv/bin
for compiler in cc gcc clang c99 tcc; do if type -P "$compiler" >/dev/null; then stop "no compiler" "$compiler is on the PATH"; fi; done
say PASS "no compiler"
cd "$room"
python -m pip install --quiet --disable-pip-version-check --only-binary :all: "$repo/$wheel"
python -P - <<'PY' || stop "native modules"
import pathlib, sys
import pp1q_transport
root = pathlib.Path(pp1q_transport.__file__).parent
assert root.is_relative_to(sys.prefix), f"{root} is not of this environment"
hot = [pxd for pxd in root.rglob("*.pxd") if pxd.with_suffix(".py").exists()] + [root / "_native/kernels.pxd", root / "_native/net.pxd"]
lost = [str(pxd) for pxd in hot if not list(pxd.parent.glob(pxd.stem + ".*.so"))]
assert len(hot) > 10, f"{len(hot)} modules with types only"
assert not lost, f"not compiled: {lost}"
sources = [str(path) for path in root.rglob("*") if path.suffix in (".c", ".pyx")]
assert not sources, f"sources in the wheel: {sources}"
from pp1q_transport import wire
from pp1q_transport._native import kernels
from pp1q_transport.session import receiver
assert all(module.__file__.endswith(".so") for module in (wire, kernels, receiver)), "imported uncompiled"
print(f"PASS  native modules         {len(hot)} of {len(hot)} compiled")
PY
version=$(pp1q --version) || stop "pp1q --version"
case $wheel in *"-${version##* }-"*) say PASS "pp1q --version" "$version" ;; *) stop "pp1q --version" "$version is not the wheel's" ;; esac
pp1q doctor || stop "pp1q doctor"
say PASS "pp1q doctor"
pp1q demo --rounds 40 --vocab 512 || stop "pp1q demo"
say PASS "pp1q demo"
