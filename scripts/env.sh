# Where the build finds CUDA, NCCL's headers, CMake and Open MPI's settings, and where it puts its own files: the one
# place that decides it. bash sources this file (`. scripts/env.sh`), as setup.sh, the Makefile and run_tests.py do.
#
# It only chooses and exports, it installs nothing: a tool kit that the machine already has wins,
# else the pinned copy under .deps/ is meant, which setup.sh puts there. GPUs, and the NCCL that
# programs run with, are looked for by gpus.py.

# What this file has chosen in another tree is not the caller's choice.
if [ "${CARGO_TARGET_DIR:-}" = "${NCCL_EP_ROOT:+$NCCL_EP_ROOT/target}" ]; then unset CARGO_TARGET_DIR; fi
NCCL_EP_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# Where cargo builds, whatever its configuration says, and below it the C programs.
NCCL_EP_TARGET=$(cd "$NCCL_EP_ROOT" && realpath -m "${CARGO_TARGET_DIR:-${CARGO_BUILD_TARGET_DIR:-target}}")
# make splits such a path into several, of which the first could be somebody else's folder.
for NCCL_EP_PLACE in "$NCCL_EP_ROOT" "$NCCL_EP_TARGET"; do
    if [[ $NCCL_EP_PLACE == *[[:space:]]* ]]; then
        echo "env.sh: make needs a path without blanks, not '$NCCL_EP_PLACE'" >&2
        return 1
    fi
done
# The machine that libraries are built for: another than this one if cargo's CARGO_BUILD_TARGET says so, which also
# names a folder then. The C tools for it have Debian's names.
NCCL_EP_MACHINE=$(uname -m)
NCCL_EP_RELEASE="$NCCL_EP_TARGET/${CARGO_BUILD_TARGET:+$CARGO_BUILD_TARGET/}release"
NCCL_EP_TOOLS=""
if [ -n "${CARGO_BUILD_TARGET:-}" ] && [ "${CARGO_BUILD_TARGET%%-*}" != "$NCCL_EP_MACHINE" ]; then
    NCCL_EP_MACHINE=${CARGO_BUILD_TARGET%%-*}
    NCCL_EP_TOOLS=$NCCL_EP_MACHINE-linux-gnu-
    NCCL_EP_LINKER=${CARGO_BUILD_TARGET//-/_}
    export "CARGO_TARGET_${NCCL_EP_LINKER^^}_LINKER=${NCCL_EP_TOOLS}gcc"
    unset NCCL_EP_LINKER
fi
# What setup.sh fetches; beside the build where the sources are read-only, with links to what they have.
NCCL_EP_DEPS="$NCCL_EP_ROOT/.deps"
if [ -d "$NCCL_EP_DEPS" ]; then NCCL_EP_PLACE=$NCCL_EP_DEPS; else NCCL_EP_PLACE=$NCCL_EP_ROOT; fi
if ! [ -w "$NCCL_EP_PLACE" ]; then NCCL_EP_DEPS="$NCCL_EP_TARGET/deps"; fi
unset NCCL_EP_PLACE
NCCL_EP_PINNED_CUDA="$NCCL_EP_DEPS/cuda/nvidia/cu13"
NCCL_EP_PINNED_NCCL="$NCCL_EP_DEPS/nccl/nvidia/nccl/include"
NCCL_EP_PINNED_CMAKE="$NCCL_EP_DEPS/cmake/cmake/data/bin"
# The driver interface is bound at the level of 12.8, the first whose nvcc knows sm_100.
NCCL_EP_MIN_NVCC=12.8

# Prints why directory $1 holds no CUDA tool kit with headers and an nvcc that is new enough; nothing if it does.
nccl_ep_cuda_refusal() {
    local version
    if ! [ -x "$1/bin/nvcc" ]; then
        echo "$1/bin/nvcc is no program"
    elif ! [ -f "$1/include/cuda_runtime.h" ]; then
        echo "$1/include has no cuda_runtime.h"
    else
        version=$("$1/bin/nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p')
        [ "$(printf '%s\n' $NCCL_EP_MIN_NVCC "${version:-0}" | sort -V | head -n1)" = $NCCL_EP_MIN_NVCC ] ||
            echo "$1 has CUDA ${version:-of an unknown version}, and $NCCL_EP_MIN_NVCC is the oldest that suits"
    fi
}

# Prints the tool kit to use: CUDA_HOME, then nvcc's in PATH, then the usual place, then ours.
nccl_ep_find_cuda() {
    local nvcc candidate
    nvcc=$(command -v nvcc || true)
    nvcc=${nvcc:+$(dirname "$(dirname "$(readlink -f "$nvcc")")")}
    for candidate in "${CUDA_HOME:-}" "$nvcc" /usr/local/cuda; do
        [ -n "$candidate" ] || continue
        if [ "$candidate" = "$NCCL_EP_PINNED_CUDA" ] || [ -z "$(nccl_ep_cuda_refusal "$candidate")" ]; then
            echo "$candidate"
            return
        fi
    done
    echo "$NCCL_EP_PINNED_CUDA"
}

# Prints the directory of nccl.h: NCCL_INCLUDE, then NCCL_HOME's, then the system's, then ours.
nccl_ep_find_nccl() {
    local candidate
    for candidate in "${NCCL_INCLUDE:-}" "${NCCL_HOME:+$NCCL_HOME/include}" /usr/include; do
        if [ -n "$candidate" ] && [ -f "$candidate/nccl.h" ]; then
            echo "$candidate"
            return
        fi
    done
    echo "$NCCL_EP_PINNED_NCCL"
}

# Why CUDA_HOME as the caller set it is not used; empty if it is, or if there is none.
NCCL_EP_REFUSED_CUDA=""
if [ -n "${CUDA_HOME:-}" ] && [ "$CUDA_HOME" != "$NCCL_EP_PINNED_CUDA" ]; then
    NCCL_EP_REFUSED_CUDA=$(nccl_ep_cuda_refusal "$CUDA_HOME")
fi
CUDA_HOME=$(nccl_ep_find_cuda)
NCCL_INCLUDE=$(nccl_ep_find_nccl)
export CUDA_HOME NCCL_INCLUDE NCCL_EP_DEPS NCCL_EP_ROOT NCCL_EP_TARGET NCCL_EP_RELEASE
export CARGO_TARGET_DIR="$NCCL_EP_TARGET"

# build.rs is told the compiler itself: cargo would build anew whenever what it is searched by
# (PATH) changes. What the caller set stays; what this file set may change with CUDA_HOME.
if [ "${NVCC:-}" = "${NCCL_EP_NVCC:-}" ]; then
    unset NVCC NCCL_EP_NVCC
    if [ -x "$CUDA_HOME/bin/nvcc" ]; then
        NVCC=$(readlink -f "$CUDA_HOME")/bin/nvcc
        export NVCC NCCL_EP_NVCC="$NVCC"
    fi
fi
# With a compiler there, `auto` and `require` are the same; cargo builds anew for another word.
if [ -n "${NVCC:-}" ] && [ "${NCCL_EP_CUDA:-auto}" = auto ]; then export NCCL_EP_CUDA=require; fi

# CMake serves one test only. At the end of PATH, so that a system copy comes first.
case ":$PATH:" in
    *":$NCCL_EP_PINNED_CMAKE:"*) ;;
    *) export PATH="$PATH:$NCCL_EP_PINNED_CMAKE" ;;
esac

# Containers and CI run as root, with fewer cores than ranks. Jobs may run side by side, so none may pin its ranks to
# the first cores; and containers often forbid the system call behind single-copy messages between processes. All ranks
# are on this machine, and a look for other ways between them, or at its devices, takes half of a short program's time.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1
export OMPI_MCA_hwloc_base_binding_policy=none
export OMPI_MCA_btl_vader_single_copy_mechanism=none
export OMPI_MCA_pml="${OMPI_MCA_pml:-ob1}" OMPI_MCA_btl="${OMPI_MCA_btl:-self,vader}"
export HWLOC_COMPONENTS="${HWLOC_COMPONENTS:--linuxio,-pci}"
