#!/usr/bin/env bash
# Proves that a profiler gets a range for each call: a tool that attaches by NVTX's own header runs beside a
# program on one rank.
#
# Usage: run.sh PROGRAM. Ends with "N passed, N failed".
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/../../scripts/env.sh"
program=${1:?usage: run.sh PROGRAM}
if ! [ -f "$CUDA_HOME/include/nvtx3/nvtxDetail/nvtxTypes.h" ]; then
    echo "1 skipped: this CUDA has no NVTX 3"
    echo "0 passed, 0 failed"
    exit 77
fi
. "$here/../package/checks.sh"
heard() { grep -qx "$1" "$work/heard" || { sort "$work/heard" | uniq -c; false; }; }
runs() { timeout 60 mpirun -np 1 env NVTX_INJECTION64_PATH="$1" NVTX_TEST_OUTPUT="$work/heard" "$program"; }

gcc -std=c11 -Wall -Wextra -Werror -fPIC -shared "$here/tool.c" -o "$work/tool.so" \
    -isystem "$CUDA_HOME/include"
check "the program runs with the tool" runs "$work/tool.so"
for name in CreateGroup CreateHandle Dispatch Combine HandleDestroy GroupDestroy; do
    check "ncclEp$name" heard "ncclEp$name"
done
check "the domain" heard "domain NCCL EP"
check "every range ends" heard "open 0"
check "all as in NVTX's header" heard "wrong 0"
check "a tool that is not there is no obstacle" runs "$work/none.so"
finish
