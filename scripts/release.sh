#!/usr/bin/env bash
# Makes the files of a release from the release build: a tarball of the library, the header and the files for
# pkg-config and CMake, which work from any folder; the wheels; and their checksums.
#
# Usage: release.sh FOLDER
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
root=$NCCL_EP_ROOT
folder=${1:?usage: release.sh FOLDER}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -n1)
name=nccl_ep-$version-linux-$(uname -m)
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
mkdir -p "$folder"
rm -f "$folder"/nccl_ep{,_deep_ep}-*.{tar.gz,whl} "$folder/SHA256SUMS"

"$root/scripts/install.sh" install prefix=/ libdir=/lib includedir=/include docdir=/ \
    DESTDIR="$stage/$name" relocatable=1 >/dev/null
strip --strip-unneeded "$stage/$name/lib/libnccl_ep.so"
strip --strip-debug "$stage/$name/lib/libnccl_ep.a"
cp "$root"/{CHANGELOG.md,SECURITY.md} "$stage/$name"
# The same sources and compiler give the same file.
tar -C "$stage" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@${SOURCE_DATE_EPOCH:-0}" \
    -cf - "$name" | gzip -n >"$folder/$name.tar.gz"
"$root/scripts/wheel.sh" "$folder" >/dev/null
(cd "$folder" && sha256sum nccl_ep{,_deep_ep}-* | tee SHA256SUMS)
