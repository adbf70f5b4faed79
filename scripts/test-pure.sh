#!/usr/bin/env bash
# The session and protocol tests with the hot modules as plain Python: a copy of the package with only _native compiled.
set -euo pipefail
cd "$(dirname "$0")/.."
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cp -r pp1q_transport "$copy/"
find "$copy/pp1q_transport" -name '*.so' -not -path '*/_native/*' -delete
cp -r tests proto pyproject.toml "$copy/"
cd "$copy"
PYTHONPATH=$copy PP1Q_EXPECT_PURE=1 "$OLDPWD/.venv/bin/python" -P -m pytest -p no:cacheprovider -m "not slow" \
  tests/protocol tests/session tests/links tests/capture/test_replay.py tests/local/test_local_channel.py \
  tests/test_build.py
