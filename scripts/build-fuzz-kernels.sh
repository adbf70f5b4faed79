#!/usr/bin/env bash
# build-fuzz-kernels.sh OUT: the C kernels with tests/fuzz/fuzz_kernels.c under GCC's sanitizers and clang's libFuzzer (a static library of
# Debian's libclang-rt-dev). Status 3 when that library is not here.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$1
native=pp1q_transport/_native
library=$(find /usr/lib/llvm-*/lib/clang /usr/lib/clang -name "libclang_rt.fuzzer-$(uname -m).a" 2>/dev/null | sort -V | tail -1) || true # no such folder: not here
[ -n "$library" ] || exit 3
if [ -x "$out" ] && [ -z "$(find tests/fuzz/fuzz_kernels.c "$native"/pp1q_*.[ch] scripts/build-fuzz-kernels.sh -newer "$out")" ]; then exit 0; fi
# The library has a call of that name which does nothing; ours comes first.
gcc -O1 -g -std=gnu11 -ffp-contract=off -fno-math-errno -fno-trapping-math -Wall -Wextra -Werror \
  -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all -fsanitize-coverage=trace-pc,trace-cmp \
  -I"$native" tests/fuzz/fuzz_kernels.c "$native"/pp1q_*.c "$library" -Wl,--allow-multiple-definition -lstdc++ -lm -o "$out"
