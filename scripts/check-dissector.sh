#!/usr/bin/env bash
# proto/pp1q.lua in tshark, on captures of demos and on golden frames: PASS, FAIL or SKIP, status 1 on a FAIL. tshark comes as a system
# package, when missing. PP1Q_REQUIRE_DISSECTOR=1 makes a SKIP a FAIL.
set -euo pipefail
cd "$(dirname "$0")/.."

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; elif command -v sudo >/dev/null; then sudo "$@"; else return 1; fi; }
if ! command -v tshark >/dev/null && command -v apt-get >/dev/null; then
  as_root apt-get update -qq >/dev/null 2>&1 || true # current lists will do all the same
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends tshark >/dev/null 2>&1 || true
fi
if ! command -v tshark >/dev/null; then
  if [ -n "${PP1Q_REQUIRE_DISSECTOR:-}" ]; then echo "FAIL  dissector: tshark can't be installed (PP1Q_REQUIRE_DISSECTOR)"; exit 1; fi
  echo "SKIP  dissector: tshark can't be installed"; exit 0
fi
if PP1Q_EXPECT_TSHARK=1 .venv/bin/python -m pytest -q tests/capture/test_dissector.py; then
  echo "PASS  dissector: $(tshark --version 2>/dev/null | head -1)"
else
  echo "FAIL  dissector"; exit 1
fi
