#!/usr/bin/env bash
# Searches every state of the Promela models in proto/model: PASS, FAIL or SKIP a line, status 1 on any FAIL. A broken variant
# passes here when Spin finds its fault. Spin and a C compiler come as system packages, when missing.
# PP1Q_REQUIRE_MODEL=1 makes a SKIP a FAIL. --long searches the larger bounds of the README's table as well.
set -euo pipefail
cd "$(dirname "$0")/.."
models=$PWD/proto/model
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
failed=0

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; elif command -v sudo >/dev/null; then sudo "$@"; else return 1; fi; }
need() { # need COMMAND PACKAGE
  command -v "$1" >/dev/null && return
  command -v apt-get >/dev/null || return
  as_root apt-get update -qq >/dev/null 2>&1 || true  # current lists will do all the same
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$2" >/dev/null 2>&1
}
if ! need spin spin || ! { need gcc gcc && need gcc libc6-dev; }; then
  if [ -n "${PP1Q_REQUIRE_MODEL:-}" ]; then echo "FAIL  models: spin and gcc can't be installed (PP1Q_REQUIRE_MODEL)"; exit 1; fi
  echo "SKIP  models: spin and gcc can't be installed"; exit 0
fi

# search MODEL BOUND...: builds and runs one search; its words are in $work/out, Spin's count of errors in $errors.
search() {
  local model=$1; shift
  rm -f pan* ./*.trail
  if ! { spin "$@" -a "$models/$model.pml" && gcc -O2 -DSAFETY -DCOLLAPSE -DVECTORSZ=2048 -w -o pan pan.c \
    && ./pan -m1000000 -w24; } >out 2>&1; then errors="?"; return; fi
  errors=$(sed -n 's/.*errors: \([0-9]*\).*/\1/p' out)
  grep -q "max search depth too small\|out of memory" out && errors="?"
  return 0
}
say() { printf '%-5s %-9s %-62s %s\n' "$1" "$2" "$3" "$4"; }
states() { sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1 states/p' out; }
holds() {
  search "$@"
  if [ "$errors" = 0 ]; then say PASS "$1" "${*:2}" "$(states)"; else say FAIL "$1" "${*:2}" "errors: $errors"; cat out; failed=1; fi
}
breaks() {
  search "$@"
  if [ "$errors" = 1 ] && grep -q "assertion violated" out; then say PASS "$1" "${*:2}" "fails, as it must"
  else say FAIL "$1" "${*:2}" "a broken variant passes"; cat out; failed=1; fi
}

none=(-DCUTS=0 -DCRASHES0=0 -DCRASHES1=0 -DLEAVES=0)
holds slot
breaks slot -DNO_FENCE
breaks slot -DIN_PLACE
holds decision -DGENS=2 -DCUTS=0 -DCRASHES0=0 -DCRASHES1=0 -DLEAVES=1
holds decision -DGENS=2 -DCUTS=1 -DCRASHES0=0 -DCRASHES1=0 -DLEAVES=0
holds decision -DGENS=1 -DCUTS=0 -DCRASHES0=1 -DCRASHES1=1 -DLEAVES=0
holds decision -DGENS=1 -DCUTS=1 -DCRASHES0=0 -DCRASHES1=0 -DLEAVES=1
breaks decision -DALONE -DGENS=1 "${none[@]}"
breaks decision -DNO_EPOCH -DGENS=1 -DCUTS=1 -DCRASHES0=0 -DCRASHES1=0 -DLEAVES=0
if [ "${1:-}" = --long ]; then
  holds decision -DGENS=2 -DCUTS=0 -DCRASHES0=1 -DCRASHES1=0 -DLEAVES=0
  holds decision -DGENS=1 -DCUTS=0 -DCRASHES0=1 -DCRASHES1=0 -DLEAVES=1
  holds decision -DGENS=1 -DCUTS=1 -DCRASHES0=0 -DCRASHES1=0 -DLEAVES=1 -DQUARRELS=1
fi
exit "$failed"
