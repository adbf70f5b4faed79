#!/usr/bin/env bash
# setup.sh run: system packages (Debian, when missing), .venv and the package. setup.sh test: what testing it needs besides.
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:-run}
python=${PYTHON:-python3}

missing=()
need() { "${@:2}" >/dev/null 2>&1 || missing+=("$1"); }
need gcc gcc --version
need libc6-dev test -e /usr/include/stdio.h
need libxxhash-dev test -e /usr/include/xxhash.h
need python3-venv "$python" -c 'import ensurepip, venv'
need python3-dev "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
if [ "$what" = test ]; then
  need gcc-aarch64-linux-gnu aarch64-linux-gnu-gcc --version
  need libc6-dev-arm64-cross test -e /usr/aarch64-linux-gnu/include/stdio.h
  need qemu-user qemu-aarch64 --version
fi
if [ ${#missing[@]} -gt 0 ]; then
  if ! command -v apt-get >/dev/null; then
    echo "setup: install these first (names as in Debian): ${missing[*]}" >&2
    exit 1
  fi
  sudo=; [ "$(id -u)" = 0 ] || sudo=sudo
  echo "setup: installing ${missing[*]}"
  $sudo apt-get update -qq
  DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

[ -x .venv/bin/python ] || "$python" -m venv .venv
pip() { .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"; }
if [ "$what" = test ]; then
  echo "setup: installing the test tools into .venv"
  readarray -t tools < <(.venv/bin/python -c '
import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["test"], sep="\n")')
  pip "${tools[@]}"
else
  echo "setup: building the package into .venv (about a minute the first time)"
  pip -e .
fi
