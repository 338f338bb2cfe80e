#!/usr/bin/env bash
# Runs the project's main job once: a real MoE layer compared with a dense one, then a short
# benchmark in both modes. On the machine's GPUs if it has any, else on the CPU backend, which is
# built without kernels, apart from what other targets build, and in the quickest way.
#   --nodes N    this machine plays N nodes by NCCL_HOSTID; on the CPU backend if it has fewer GPUs
#   --long       all output of the programs; the benchmark's is always shown on GPUs
#   --built DIR  builds nothing, and runs the programs in DIR
#
# With GPUs there is no way back to the CPU: what the CUDA backend cannot do ends this run with its error.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/env.sh

nodes=1
long=
programs=
while [ $# -gt 0 ]; do
    case "$1" in
        --nodes=?* | --built=?*) set -- "${1%%=*}" "${1#*=}" "${@:2}" && continue ;;
        --long) long=yes ;;
        --nodes) [[ ${2:-} == [1-8] ]] && nodes=$2 && shift ;;
        --built) [ -d "${2:-}" ] && programs=$2 && shift ;;
        *) false ;;
    esac || {
        echo "usage: demo.sh [--nodes 1 to 8] [--long] [--built DIR]" >&2
        exit 2
    }
    shift
done

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
    show_bench=yes
    found="$gpus GPU(s) here: on the CUDA backend, one rank on each of $ranks"
    time="2 to 4 minutes at first, most of them for the kernels"
    packages=(--release --workspace)
    libraries=$NCCL_EP_RELEASE
    built=$NCCL_EP_TARGET/c
    settings=()
else
    kind=host
    ranks=8
    bench=(--tokens 32 --hidden 1024 --warmup 1 --iters 5 --validate)
    show_bench=$long
    found="no GPU here: on the CPU backend, $ranks processes"
    time="about a minute at first"
    if [ "$gpus" -gt 0 ]; then
        found="$gpus GPU(s) here, too few for $nodes nodes: on the CPU backend, $ranks processes"
        export NCCLEP_HOSTSIM_WITH_GPU=1
    fi
    export NCCL_EP_CUDA=off
    packages=(-p nccl-ep -p ncclep-hostsim)
    libraries=${NCCL_EP_RELEASE%/*}/debug
    built=$NCCL_EP_TARGET/c-demo
    settings=(OPTIMISE=-O0)
    # What setup.sh fetches for this alone.
    [ -d "$CUDA_HOME/include" ] || export CUDA_HOME="$NCCL_EP_DEPS/cuda-headers/nvidia/cu13"
fi

# Shows the lines of make in one place of a terminal, and nowhere else.
show_progress() {
    local line
    while IFS= read -r line; do [ ! -t 1 ] || printf '\r\033[K%.78s' "$line"; done
    [ ! -t 1 ] || printf '\r\033[K'
}

echo "== $found"
if [ -z "$programs" ]; then
    echo "== building ($time)"
    programs=$built/$kind
    [ -t 2 ] || packages+=(--quiet)
    cargo build --locked "${packages[@]}"
    make -j"$(nproc)" --no-print-directory -C c_tests EP_LIBDIR="$libraries" OUT="$built" \
        "${settings[@]}" "$programs/moe_layer" "$programs/ep_bench" | show_progress
fi

run=(mpirun -np "$ranks")
on_nodes=
if [ "$nodes" -gt 1 ]; then
    run+=(scripts/on_nodes.sh "$nodes")
    on_nodes=" on $nodes nodes, which this machine plays by NCCL_HOSTID"
fi

# Runs a program and keeps its output in `output`, which it shows if $1 is `yes` or the run fails.
perform() {
    local show=$1
    if [ "$show" = yes ]; then
        "${run[@]}" "${@:2}"
    elif ! output=$("${run[@]}" "${@:2}" 2>&1); then
        printf '%s\n' "$output" >&2
        exit 1
    fi
}

echo "== moe_layer on $ranks ranks$on_nodes: rows from each rank to the ranks of the experts"
perform "$long" "$programs/moe_layer" --picture
# The first table, that of low latency.
[ "$long" = yes ] || sed -n '/^  rows/,/^$/p' <<<"$output" | sed '/^$/q'
for algorithm in ll ht; do
    echo "== ep_bench --algorithm $algorithm on $ranks ranks: every row of dispatch and combine checked"
    perform "$show_bench" "$programs/ep_bench" --algorithm "$algorithm" "${bench[@]}"
done
[ "$nodes" = 1 ] || on_nodes=" on $nodes nodes"
echo "== done: all of it ran on the ${kind/host/CPU} backend$on_nodes and matched"
