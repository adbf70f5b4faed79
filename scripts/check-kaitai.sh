#!/usr/bin/env bash
# proto/pp1q_v2.ksy, compiled, against golden and random frames: PASS, FAIL or SKIP, status 1 on a FAIL. npm comes as a system package, when
# missing, and the compiler by npm into .cache/kaitai. PP1Q_REQUIRE_KAITAI=1 makes a SKIP a FAIL.
set -euo pipefail
cd "$(dirname "$0")/.."

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; elif command -v sudo >/dev/null; then sudo "$@"; else return 1; fi; }
if ! command -v npm >/dev/null && command -v apt-get >/dev/null; then
  as_root apt-get update -qq >/dev/null 2>&1 || true # current lists will do all the same
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends npm >/dev/null 2>&1 || true
fi
if ! command -v npm >/dev/null; then
  if [ -n "${PP1Q_REQUIRE_KAITAI:-}" ]; then echo "FAIL  kaitai: npm can't be installed (PP1Q_REQUIRE_KAITAI)"; exit 1; fi
  echo "SKIP  kaitai: npm can't be installed"; exit 0
fi
said=$(mktemp)
trap 'rm -f "$said"' EXIT
if ! PP1Q_EXPECT_NPM=${PP1Q_REQUIRE_KAITAI:-} .venv/bin/python -m pytest -q tests/protocol/test_kaitai.py >"$said" 2>&1; then cat "$said"; echo "FAIL  kaitai"; exit 1; fi
if grep -q "^SKIPPED" "$said"; then echo "SKIP  kaitai: $(sed -n 's/^SKIPPED.*py:[0-9]*: //p' "$said" | head -1)"
else echo "PASS  kaitai: $(tail -1 "$said")"; fi
