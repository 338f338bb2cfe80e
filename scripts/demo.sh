#!/usr/bin/env bash
# Runs the project's main job once: a real MoE layer compared with a dense one, then a short
# benchmark in both modes. On the machine's GPUs if it has any, else on the CPU backend.
#
# With GPUs there is no way back to the CPU: what the CUDA backend cannot do ends this run with its
# error.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/env.sh

gpus=$(scripts/gpus.py count)
if [ "$gpus" -gt 0 ]; then
    kind=gpu
    export NCCL_EP_CUDA=require
    nccl=$(scripts/gpus.py nccl) || {
        echo "demo: no libnccl.so.2 here: set NCCL_HOME, or let \`make run\` fetch one" >&2
        exit 1
    }
    [ "$nccl" = system ] || export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$nccl"
    for ranks in 8 4 2 1; do [ $ranks -le "$gpus" ] && break; done
    bench=(--validate)
    echo "== $gpus GPU(s) here: running on the CUDA backend, one rank on each of $ranks"
else
    kind=host
    ranks=8
    bench=(--tokens 32 --hidden 1024 --warmup 1 --iters 5 --validate)
    echo "== no GPU here: running on the CPU backend, $ranks processes (times mean nothing)"
fi

programs=$NCCL_EP_TARGET/c/$kind
cargo build --quiet --release --locked --workspace
make --silent --no-print-directory -C c_tests EP_LIBDIR="$NCCL_EP_TARGET/release" \
    OUT="$NCCL_EP_TARGET/c" "$programs/moe_layer" "$programs/ep_bench"

echo "== moe_layer on $ranks ranks"
mpirun -np "$ranks" "$programs/moe_layer"
for algorithm in ll ht; do
    echo "== ep_bench --algorithm $algorithm on $ranks ranks"
    mpirun -np "$ranks" "$programs/ep_bench" --algorithm "$algorithm" "${bench[@]}"
done
echo "== done: all of it ran on the ${kind/host/CPU} backend and matched"
