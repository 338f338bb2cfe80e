#!/usr/bin/env bash
# Runs a program whose ranks believe to be on several nodes, though one machine runs all of them:
#   mpirun -np 4 scripts/on_nodes.sh 2 PROGRAM [OPTION...]        ranks 0 and 1, ranks 2 and 3
#   mpirun -np 4 scripts/on_nodes.sh 0,0,0,1 PROGRAM [OPTION...]  the node of each rank
# NCCL and this library take NCCL_HOSTID for the identity of a machine. Works below mpirun, srun and torchrun.
set -euo pipefail

if [ $# -lt 2 ]; then
    sed -n '2,6s/^# //p' "$0" >&2
    exit 2
fi
nodes=$1
shift

rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${SLURM_PROCID:-${RANK:-}}}}
size=${OMPI_COMM_WORLD_SIZE:-${PMI_SIZE:-${SLURM_NTASKS:-${WORLD_SIZE:-}}}}
if [ -z "$rank" ] || [ -z "$size" ]; then
    echo "on_nodes.sh: which rank is this? Start it with mpirun, srun or torchrun" >&2
    exit 2
fi

case "$nodes" in
    *,*)
        IFS=, read -ra of_rank <<<"$nodes"
        if [ ${#of_rank[@]} != "$size" ]; then
            echo "on_nodes.sh: $nodes are the nodes of ${#of_rank[@]} ranks, but there are $size" >&2
            exit 2
        fi
        node=${of_rank[$rank]}
        ;;
    '' | 0 | *[!0-9]*)
        echo "on_nodes.sh: the number of nodes or the node of each rank comes first, not $nodes" >&2
        exit 2
        ;;
    *)
        if [ "$nodes" -gt "$size" ]; then
            echo "on_nodes.sh: $nodes nodes need as many ranks or more, and there are $size" >&2
            exit 2
        fi
        node=$((rank * nodes / size))
        ;;
esac
export NCCL_HOSTID=node$node
exec "$@"
