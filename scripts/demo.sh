#!/usr/bin/env bash
# Runs the project's main job once: a real MoE layer compared with a dense one, then a short
# benchmark in both modes. On the machine's GPUs if it has any, else on the CPU backend.
#   --nodes N   this machine plays N nodes by NCCL_HOSTID; on the CPU backend if it has fewer GPUs
#
# With GPUs there is no way back to the CPU: what the CUDA backend cannot do ends this run with its
# error.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/env.sh

nodes=1
case "$*" in
    '') ;;
    '--nodes '[1-8] | '--nodes='[1-8]) nodes=${*: -1} && nodes=${nodes#--nodes=} ;;
    *)
        echo "usage: demo.sh [--nodes 1 to 8]" >&2
        exit 2
        ;;
esac

gpus=$(scripts/gpus.py count)
for ranks in 8 4 2 1; do [ $ranks -le "$gpus" ] && break; done
if [ "$gpus" -gt 0 ] && [ $ranks -ge "$nodes" ]; then
    kind=gpu
    export NCCL_EP_CUDA=require
    nccl=$(scripts/gpus.py nccl) || {
        echo "demo: no libnccl.so.2 here: set NCCL_HOME, or let \`make run\` fetch one" >&2
        exit 1
    }
    [ "$nccl" = system ] || export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$nccl"
    bench=(--validate)
    echo "== $gpus GPU(s) here: running on the CUDA backend, one rank on each of $ranks"
else
    kind=host
    ranks=8
    bench=(--tokens 32 --hidden 1024 --warmup 1 --iters 5 --validate)
    found="no GPU here"
    if [ "$gpus" -gt 0 ]; then
        found="$gpus GPU(s) here, too few for $nodes nodes"
        export NCCLEP_HOSTSIM_WITH_GPU=1
    fi
    echo "== $found: running on the CPU backend, $ranks processes (times mean nothing)"
fi

run=(mpirun -np "$ranks")
on_nodes=
if [ "$nodes" -gt 1 ]; then
    run+=(scripts/on_nodes.sh "$nodes")
    on_nodes=" on $nodes nodes"
    echo "== this machine plays $nodes nodes: each rank has the NCCL_HOSTID of one of them"
fi

programs=$NCCL_EP_TARGET/c/$kind
cargo build --quiet --release --locked --workspace
make --silent --no-print-directory -C c_tests EP_LIBDIR="$NCCL_EP_TARGET/release" \
    OUT="$NCCL_EP_TARGET/c" "$programs/moe_layer" "$programs/ep_bench"

echo "== moe_layer on $ranks ranks$on_nodes"
"${run[@]}" "$programs/moe_layer"
for algorithm in ll ht; do
    echo "== ep_bench --algorithm $algorithm on $ranks ranks$on_nodes"
    "${run[@]}" "$programs/ep_bench" --algorithm "$algorithm" "${bench[@]}"
done
echo "== done: all of it ran on the ${kind/host/CPU} backend$on_nodes and matched"
