#!/usr/bin/env bash
# Proves that a release works from any folder: makes one twice, unpacks it, builds and runs a program with it
# through pkg-config and through CMake.
#
# Usage: run.sh. Takes the release build. Ends with "N passed, N failed".
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/../../../scripts/env.sh"
. "$here/../checks.sh"

make_release() { "$NCCL_EP_ROOT/scripts/release.sh" "$1"; }
same_tarball() { (umask 077 && make_release "$work/again") && cmp "$work"/{files,again}/nccl_ep-*-linux-*.tar.gz; }
sums_fit() { (cd "$work/files" && sha256sum -c SHA256SUMS && [ "$(wc -l <SHA256SUMS)" = 4 ]); }
unpacks() { tar -C "$work" -xzf "$work"/files/nccl_ep-*-linux-*.tar.gz && mv "$work"/nccl_ep-* "$work/some where"; }
has_all() {
    cd "$work/some where" && ls LICENSE THIRD-PARTY.txt README.md CHANGELOG.md SECURITY.md docs/guide/README.md \
        include/nccl_ep.{h,hpp} lib/libnccl_ep.{a,so} lib/pkgconfig/nccl_ep.pc lib/cmake/nccl_ep/nccl_ep-config.cmake \
        lib/nccl_ep_2/libnccl_ep.{a,so.0} lib/pkgconfig/nccl_ep_2.pc include/nccl_ep_2/nccl_ep/ep_enums.h
}
builds_an_example() {
    local flags
    flags=$(PKG_CONFIG_PATH="$work/some where/lib/pkgconfig" pkg-config --cflags --libs nccl_ep)
    eval mpicxx -std=c++17 "'$work/some where/examples/cpp/low_latency.cpp'" -o "'$work/example'" -DOMPI_SKIP_MPICXX \
        -isystem "'$CUDA_HOME/include'" -isystem "'$NCCL_INCLUDE'" "$flags" -L"'$NCCL_EP_RELEASE'" \
        -lncclep_hostsim
    LD_LIBRARY_PATH="$work/some where/lib:$NCCL_EP_RELEASE" NCCLEP_HOSTSIM_WITH_GPU=1 \
        timeout 60 mpirun -np 2 "$work/example"
}
has_licences() { grep -q "^  half " "$work/some where/THIRD-PARTY.txt"; }
builds_by_pkg_config() {
    local flags
    flags=$(PKG_CONFIG_PATH="$work/some where/lib/pkgconfig" pkg-config --cflags --libs nccl_ep)
    eval gcc "'$here/../consumer/plain.c'" -o "'$work/plain'" -isystem "'$CUDA_HOME/include'" \
        -isystem "'$NCCL_INCLUDE'" "$flags" && LD_LIBRARY_PATH="$work/some where/lib" "$work/plain"
}
builds_by_cmake() {
    cmake -S "$here/../consumer" -B "$work/cmake" -DCMAKE_PREFIX_PATH="$work/some where" \
        -DHOSTSIM_DIRECTORY="$NCCL_EP_RELEASE" &&
        cmake --build "$work/cmake" --target plain_nccl_ep && "$work/cmake/plain_nccl_ep"
}

check "a release" make_release "$work/files"
check "the same again" same_tarball
check "checksums" sums_fit
check "it unpacks" unpacks
check "it has all files" has_all
check "it has the licences of its parts" has_licences
check "pkg-config" builds_by_pkg_config
check "CMake" builds_by_cmake
check "an example that it brings" builds_an_example
finish
