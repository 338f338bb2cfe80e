#!/usr/bin/env bash
# Builds the library and some C programs for AArch64 on another machine, and runs the programs under qemu-user; or makes
# the files of a release. What qemu shows on x86-64 is code, layouts and arithmetic: it does not reorder accesses
# to memory as AArch64 may.
#
# Other shapes of LL and HT than test_random's take too long here, and so do thousands of operations and the second
# interface's refusals.
#
# Usage: run.sh programs|release. Installs what it needs, and is skipped where that fails. Ends with
# "N passed, N failed".
set -euo pipefail

what=${1:?usage: run.sh programs|release}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export CARGO_BUILD_TARGET=aarch64-unknown-linux-gnu
. "$here/../../scripts/env.sh"
. "$here/../package/checks.sh"

skip() {
    echo "1 skipped: $*"
    echo "0 passed, 0 failed"
    exit 77
}

[ -n "$NCCL_EP_TOOLS" ] || skip "this is an AArch64 machine, which runs all other tests itself"
"$NCCL_EP_ROOT/scripts/setup.sh" --library --wheel --emulator >"$work/log" 2>&1 ||
    skip "AArch64 cannot be built or emulated here: $(grep -v ': installing\|: fetching' "$work/log" | head -n1)"

libraries=$NCCL_EP_TARGET/$CARGO_BUILD_TARGET/debug
programs=$NCCL_EP_TARGET/aarch64/c
export QEMU_LD_PREFIX=${QEMU_LD_PREFIX:-/usr/aarch64-linux-gnu}
export NCCL_EP_LIBRARIES=$libraries

# Not optimised, as that would take twice as long, and without kernels, which are no AArch64 code. What makes headers
# during the build is that of the Rust tests.
build_libraries() {
    NVCC=$NCCL_EP_ROOT/scripts/testing/nvcc_stub.sh CARGO_PROFILE_DEV_DEBUG=0 \
        cargo build --locked -p nccl-ep -p nccl-ep-second -p ncclep-hostsim
}
build_programs() {
    # Linked anew, as make does not know mpi.o.
    rm -rf "$programs/host" && mkdir -p "$programs"
    "${NCCL_EP_TOOLS}gcc" -std=c11 -O2 -Wall -Wextra -Wpedantic -Werror -c "$here/mpi.c" -o "$programs/mpi.o"
    make -j2 --no-print-directory -C "$here/.." CC="${NCCL_EP_TOOLS}gcc" CXX="${NCCL_EP_TOOLS}g++" OUT="$programs" \
        MPI_COMPILE="-isystem $here" MPI_LINK="$programs/mpi.o" EP_LIBDIR="$libraries" "${@/#/$programs/host/}"
}
# run RANKS PROGRAM ARGUMENT...
run() { EP_TEST_RANKS=$1 NCCLEP_HOSTSIM_WITH_GPU=1 qemu-aarch64 "$programs/host/$2" "${@:3}"; }
make_release() { "$NCCL_EP_ROOT/scripts/release.sh" "$work/files"; }
has_names() (
    cd "$work/files" && ls nccl_ep-*-linux-aarch64.tar.gz nccl_ep-*-py3-none-manylinux_*_aarch64.whl &&
        sha256sum -c SHA256SUMS
)
wheel_fits() {
    local platform
    platform=$(cd "$work/files" && echo nccl_ep-*.whl | grep -o 'manylinux_[0-9]*_[0-9]*_aarch64')
    python3 -m pip --disable-pip-version-check install --quiet --no-index --no-deps --only-binary=:all: \
        --platform "$platform" --target "$work/wheel" "$work"/files/*.whl
}
wheel_works() { LD_LIBRARY_PATH=$work/wheel/nccl_ep/lib run 2 example_low_latency; }

test_programs() {
    check "programs" build_programs example_{low_latency,high_throughput,staged} \
        test_{abi,ll,ht,formats,random,second}
    [ "$failed" = 0 ] || return 0
    for example in low_latency high_throughput staged; do check "$example" run 3 "example_$example"; done
    check "layouts of structs" run 1 test_abi
    check "LL" run 2 test_ll ll_ids ll_unordered ll_handle ll_weights
    check "HT" run 3 test_ht ht_unordered ht_outputs
    check "formats" run 2 test_formats formats_of_models
    check "casts" run 2 test_formats known_casts
    check "the second interface" run 2 test_second delivers_flat rows_by_rank structs_have
    check "random operations" run 3 test_random --configs 20
}
test_release() {
    check "programs" build_programs example_low_latency
    check "a release" make_release
    check "its files" has_names
    check "pip takes the wheel" wheel_fits
    check "the wheel's library" wheel_works
}

check "libraries" build_libraries
[ "$failed" != 0 ] || "test_$what"
finish
