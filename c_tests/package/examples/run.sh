#!/usr/bin/env bash
# Proves that examples/c stands alone: builds it against an installed library, as its README says, by
# one command with pkg-config and by its CMakeLists.txt, and runs what came out on the CPU.
#
# Usage: run.sh [LIBRARY_DIRECTORY], by default the release build's. Ends with "N passed, N failed".
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/../../../scripts/env.sh"
libraries=$(cd "${1:-$NCCL_EP_TARGET/release}" && pwd)
examples=$NCCL_EP_ROOT/examples/c
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
prefix=$work/prefix
export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
export LD_LIBRARY_PATH=$prefix/lib:$work/lib
passed=0
failed=0

# check NAME COMMAND...: counts one check, and prints the command's output if it failed.
check() {
    local name=$1
    shift
    if timeout 60 "$@" >"$work/log" 2>&1; then
        passed=$((passed + 1))
        echo "ok: $name"
    else
        failed=$((failed + 1))
        echo "FAILED: $name"
        sed 's/^/    /' "$work/log"
    fi
}

# A user's -lnccl -lcudart find the stand-ins here.
mkdir "$work/lib"
for name in libncclep_hostsim.so libnccl.so libcudart.so; do
    ln -s "$libraries/libncclep_hostsim.so" "$work/lib/$name"
done
check "install" env NCCL_EP_LIBRARIES="$libraries" "$NCCL_EP_ROOT/scripts/install.sh" install prefix="$prefix"

names=()
for file in "$examples"/*.c; do names+=("$(basename "$file" .c)"); done
for name in "${names[@]}"; do
    read -ra flags <<<"$(pkg-config --cflags --libs nccl_ep)"
    check "pkg-config: build $name" mpicc "$examples/$name.c" -o "$work/$name" -Wall -Werror \
        -isystem "$CUDA_HOME/include" -isystem "$NCCL_INCLUDE" "${flags[@]}" \
        -L"$work/lib" -lnccl -lcudart
    check "pkg-config: run $name" mpirun -np 2 "$work/$name"
done

check "cmake: configure" cmake -S "$examples" -B "$work/cmake" -DCMAKE_PREFIX_PATH="$prefix" \
    -DCMAKE_MODULE_PATH="$here" -DSTAND_INS="$work/lib/libcudart.so" \
    -DNCCL_LIBRARY="$work/lib/libnccl.so"
check "cmake: build" cmake --build "$work/cmake"
for name in "${names[@]}"; do
    check "cmake: run $name" mpirun -np 2 "$work/cmake/$name"
done
echo "$passed passed, $failed failed"
[ $failed = 0 ]
