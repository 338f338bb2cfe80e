#!/usr/bin/env bash
# Benchmarks both modes at the reference's default sizes, on 1, 2, 4 and 8 of this machine's GPUs as
# far as they go. Further arguments go to ep_bench.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/env.sh

gpus=$(nccl_ep_gpu_count)
if [ "$gpus" = 0 ]; then
    echo "no GPU on this machine: nothing to run"
    exit 0
fi
for ranks in 1 2 4 8; do
    [ $ranks -le "$gpus" ] || break
    for algorithm in ll ht; do
        echo "== ep_bench --algorithm $algorithm on $ranks GPU(s)"
        mpirun -np $ranks "$NCCL_EP_TARGET/c/gpu/ep_bench" --algorithm $algorithm --validate "$@"
    done
done
