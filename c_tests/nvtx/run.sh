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
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0
failed=0
check() {
    if "${@:2}"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED: $1"
        sort "$work/heard" | uniq -c || true
    fi
}
heard() { grep -qx "$1" "$work/heard"; }
runs() { timeout 60 mpirun -np 1 env NVTX_INJECTION64_PATH="$1" NVTX_TEST_OUTPUT="$work/heard" "$program" >"$work/log" 2>&1 || { cat "$work/log"; return 1; }; }

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
echo "$passed passed, $failed failed"
[ $failed = 0 ]
