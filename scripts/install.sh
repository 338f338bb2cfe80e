#!/usr/bin/env bash
# Installs the release build: both libraries, the header, and the files by which pkg-config and
# CMake find them.
#
# Usage: install.sh PREFIX [DESTDIR]. With DESTDIR the files are staged below it, for a package.
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
root=$NCCL_EP_ROOT
prefix=${1:?usage: install.sh PREFIX [DESTDIR]}
[[ $prefix == /* ]] || { echo "install: PREFIX must be an absolute path, not $prefix" >&2; exit 1; }
target=${2:-}$prefix
libraries=${NCCL_EP_LIBRARIES:-$NCCL_EP_TARGET/release}
# Root, who installs, often has no compiler, and would leave files in target/ that are not the user's.
for library in libnccl_ep.so libnccl_ep.a; do
    [ -f "$libraries/$library" ] || {
        echo "install: $libraries/$library is missing: run \`make lib\` first" >&2
        exit 1
    }
done

version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -n1)
IFS=. read -r major minor _ <<<"$version"

# fill TEMPLATE FILE: replaces the placeholders of a template.
fill() {
    mkdir -p "$(dirname "$2")"
    sed -e "s|@PREFIX@|$prefix|g" -e "s|@VERSION@|$version|g" \
        -e "s|@VERSION_MAJOR@|$major|g" -e "s|@VERSION_MINOR@|$minor|g" \
        -e "s|@NATIVE_STATIC_LIBS@|$(cat "$root/packaging/native-static-libs")|g" \
        "$root/packaging/$1" >"$2"
    chmod 644 "$2"
}

install -D -m 755 "$libraries/libnccl_ep.so" "$target/lib/libnccl_ep.so"
install -D -m 644 "$libraries/libnccl_ep.a" "$target/lib/libnccl_ep.a"
install -D -m 644 "$root/include/nccl_ep.h" "$target/include/nccl_ep.h"
fill nccl_ep.pc.in "$target/lib/pkgconfig/nccl_ep.pc"
fill nccl_ep-config.cmake.in "$target/lib/cmake/nccl_ep/nccl_ep-config.cmake"
fill nccl_ep-config-version.cmake.in "$target/lib/cmake/nccl_ep/nccl_ep-config-version.cmake"
echo "installed nccl_ep $version in $target"
