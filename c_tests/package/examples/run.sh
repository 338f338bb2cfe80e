#!/usr/bin/env bash
# Proves that examples/c and examples/cpp stand alone: builds them against an installed library, as their
# READMEs say, by one command with pkg-config and by CMakeLists.txt, and runs what came out on the CPU.
#
# Usage: run.sh [LIBRARY_DIRECTORY], by default the release build's. Ends with "N passed, N failed".
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/../../../scripts/env.sh"
. "$here/../checks.sh"
libraries=$(cd "${1:-$NCCL_EP_RELEASE}" && pwd)
prefix=$work/prefix
export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
export LD_LIBRARY_PATH=$prefix/lib:$work/lib

# The programs wait for each other.
limited() { check "$1" timeout 60 "${@:2}"; }

# A user's -l:libnccl.so.2 -lcudart find the stand-ins here; PyPI's NCCL has no other name.
mkdir "$work/lib"
for name in libncclep_hostsim.so libnccl.so.2 libcudart.so; do
    ln -s "$libraries/libncclep_hostsim.so" "$work/lib/$name"
done
limited "install" env NCCL_EP_LIBRARIES="$libraries" "$NCCL_EP_ROOT/scripts/install.sh" install prefix="$prefix"

# examples FOLDER COMPILER ENDING: all of one language.
examples() {
    local folder=$NCCL_EP_ROOT/examples/$1 file names=() name flags
    for file in "$folder"/*."$3"; do names+=("$(basename "$file" ".$3")"); done
    for name in "${names[@]}"; do
        read -ra flags <<<"$(pkg-config --cflags --libs nccl_ep)"
        limited "pkg-config: build $name, $1" $2 "$folder/$name.$3" -o "$work/$name" -Wall -Werror \
            -DOMPI_SKIP_MPICXX -isystem "$CUDA_HOME/include" -isystem "$NCCL_INCLUDE" "${flags[@]}" \
            -L"$work/lib" -l:libnccl.so.2 -lcudart
        limited "pkg-config: run $name, $1" mpirun -np 2 "$work/$name"
    done
    limited "cmake: configure $1" env NCCL_HOME="$work" cmake -S "$folder" -B "$work/cmake-$1" \
        -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_MODULE_PATH="$here" -DSTAND_INS="$work/lib/libcudart.so"
    limited "cmake: build $1" cmake --build "$work/cmake-$1"
    for name in "${names[@]}"; do
        limited "cmake: run $name, $1" mpirun -np 2 "$work/cmake-$1/$name"
    done
}

examples c mpicc c
examples cpp "mpicxx -std=c++17" cpp
finish
