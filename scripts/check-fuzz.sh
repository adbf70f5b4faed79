#!/usr/bin/env bash
# Fuzzes every target of tests/fuzz for FUZZ_S seconds each (6): a line each with PASS, FAIL or SKIP and the executions, status 1 on a FAIL, with
# the input that did it. FUZZ_ONLY="receiver leader" takes these alone, FUZZ_SEED another seed. What is learned stays in .cache/fuzz/corpus.
# atheris comes by pip into .venv, libFuzzer for the C kernels as a system package, when missing. PP1Q_REQUIRE_FUZZ=1 makes a SKIP a FAIL.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${FUZZ_S:-6}
seed=${FUZZ_SEED:-1}
work=$PWD/.cache/fuzz
mkdir -p "$work/findings"
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
failed=0

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; elif command -v sudo >/dev/null; then sudo "$@"; else return 1; fi; }
say() { printf '%-5s fuzz %-11s %s\n' "$1" "$2" "$3"; }
skip() {
  if [ -n "${PP1Q_REQUIRE_FUZZ:-}" ]; then say FAIL "$1" "$2 (PP1Q_REQUIRE_FUZZ)"; failed=1; else say SKIP "$1" "$2"; fi
}
verdict() { # verdict TARGET STATUS LOG
  local done_s
  done_s=$(sed -n 's/^stat::number_of_executed_units: //p' "$3" | tail -1)
  if [ "$2" = 0 ] && [ -n "$done_s" ]; then say PASS "$1" "$done_s executions"; return; fi
  tail -40 "$3"
  say FAIL "$1" "status $2; reproducer: $(sed -n 's/.*Test unit written to //p' "$3" | tail -1)"
  failed=1
}

# Atheris sees branches of plain Python only: the hot modules run uncompiled, and what it learned is then played through the compiled ones.
cp -r pp1q_transport "$copy/"
find "$copy/pp1q_transport" -name '*.so' -not -path '*/_native/*' -delete
targets=$(.venv/bin/python -c 'import sys; sys.path.insert(0, "tests/fuzz"); import fuzz_targets; print(*fuzz_targets.TARGETS)')
.venv/bin/python -c 'import atheris' 2>/dev/null || .venv/bin/python -m pip install --quiet --disable-pip-version-check 'atheris>=3,<4' >/dev/null 2>&1 || true
for target in ${FUZZ_ONLY:-$targets kernels}; do
  log=$copy/$target.log
  status=0
  if [ "$target" = kernels ]; then
    scripts/build-fuzz-kernels.sh "$work/fuzz_kernels" || status=$?
    if [ "$status" = 3 ] && command -v apt-get >/dev/null; then
      as_root apt-get update -qq >/dev/null 2>&1 || true # current lists will do all the same
      as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends libclang-rt-dev g++ >/dev/null 2>&1 || true
      status=0
      scripts/build-fuzz-kernels.sh "$work/fuzz_kernels" || status=$?
    fi
    if [ "$status" = 3 ]; then skip kernels "libclang-rt-dev can't be installed"; continue; fi
    if [ "$status" != 0 ]; then say FAIL kernels "does not build"; failed=1; continue; fi
    .venv/bin/python tests/fuzz/fuzz_run.py kernels --work "$work"
    "$work/fuzz_kernels" -max_total_time="$seconds" -seed="$seed" -max_len=8192 -timeout=30 -rss_limit_mb=2048 -print_final_stats=1 \
      -artifact_prefix="$work/findings/kernels-" "$work/corpus/kernels" >"$log" 2>&1 || status=$?
    verdict kernels "$status" "$log"
    continue
  fi
  if ! .venv/bin/python -c 'import atheris' 2>/dev/null; then skip "$target" "atheris can't be installed"; continue; fi
  PYTHONPATH=$copy .venv/bin/python -P tests/fuzz/fuzz_run.py "$target" --seconds "$seconds" --seed "$seed" --work "$work" >"$log" 2>&1 || status=$?
  if [ "$status" = 0 ]; then
    if .venv/bin/python tests/fuzz/fuzz_run.py "$target" "$work/corpus/$target" >"$copy/played" 2>"$copy/named"; then :; else
      cat "$copy/played"; say FAIL "$target" "the compiled modules fail on what the plain ones pass; last: $(tail -1 "$copy/named")"; failed=1; continue
    fi
  fi
  verdict "$target" "$status" "$log"
done
exit "$failed"
