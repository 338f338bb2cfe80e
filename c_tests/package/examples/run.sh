#!/usr/bin/env bash
# Proves that examples/c stands alone: builds it against an installed library, as its README says, by
# one command with pkg-config and by its CMakeLists.txt, and runs what came out on the CPU.
#
# Usage: run.sh [LIBRARY_DIRECTORY], by default the release build's. Ends with "N passed, N failed".
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/../../../scripts/env.sh"
. "$here/../checks.sh"
libraries=$(cd "${1:-$NCCL_EP_TARGET/release}" && pwd)
examples=$NCCL_EP_ROOT/examples/c
prefix=$work/prefix
export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
export LD_LIBRARY_PATH=$prefix/lib:$work/lib

# The programs wait for each other.
limited() { check "$1" timeout 60 "${@:2}"; }

# A user's -lnccl -lcudart find the stand-ins here.
mkdir "$work/lib"
for name in libncclep_hostsim.so libnccl.so libcudart.so; do
    ln -s "$libraries/libncclep_hostsim.so" "$work/lib/$name"
done
limited "install" env NCCL_EP_LIBRARIES="$libraries" "$NCCL_EP_ROOT/scripts/install.sh" install prefix="$prefix"

names=()
for file in "$examples"/*.c; do names+=("$(basename "$file" .c)"); done
for name in "${names[@]}"; do
    read -ra flags <<<"$(pkg-config --cflags --libs nccl_ep)"
    limited "pkg-config: build $name" mpicc "$examples/$name.c" -o "$work/$name" -Wall -Werror \
        -isystem "$CUDA_HOME/include" -isystem "$NCCL_INCLUDE" "${flags[@]}" \
        -L"$work/lib" -lnccl -lcudart
    limited "pkg-config: run $name" mpirun -np 2 "$work/$name"
done

limited "cmake: configure" cmake -S "$examples" -B "$work/cmake" -DCMAKE_PREFIX_PATH="$prefix" \
    -DCMAKE_MODULE_PATH="$here" -DSTAND_INS="$work/lib/libcudart.so" \
    -DNCCL_LIBRARY="$work/lib/libnccl.so"
limited "cmake: build" cmake --build "$work/cmake"
for name in "${names[@]}"; do
    limited "cmake: run $name" mpirun -np 2 "$work/cmake/$name"
done
finish
