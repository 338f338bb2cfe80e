#!/usr/bin/env bash
# Makes the files of a release from the release build: a tarball of the libraries, the headers, the files for pkg-config
# and CMake, which work from any folder, the documents and the examples; the wheels and the source distribution of the
# Python package; and their checksums.
#
# Usage: release.sh FOLDER
set -euo pipefail
umask 022

. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
root=$NCCL_EP_ROOT
folder=${1:?usage: release.sh FOLDER}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -n1)
name=nccl_ep-$version-linux-$NCCL_EP_MACHINE
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
mkdir -p "$folder"
# Those of other machines stay.
rm -f "$folder"/nccl_ep-{*"$NCCL_EP_MACHINE","$version"}.tar.gz "$folder/SHA256SUMS"

"$root/scripts/install.sh" install prefix=/ libdir=/lib includedir=/include docdir=/ \
    DESTDIR="$stage/$name" relocatable=1 >/dev/null
"${NCCL_EP_TOOLS}strip" --strip-unneeded "$stage/$name"/lib/{libnccl_ep.so,nccl_ep_2/libnccl_ep.so.*.*.*}
"${NCCL_EP_TOOLS}strip" --strip-debug "$stage/$name"/lib/{,nccl_ep_2/}libnccl_ep.a
cp -r "$root"/{README.md,CHANGELOG.md,SECURITY.md,docs,examples} "$stage/$name"
chmod -R u=rwX,go=rX "$stage"  # whatever the modes of the sources
find "$stage/$name" -name __pycache__ -prune -exec rm -r {} +
# The same sources and compiler give the same file.
tar -C "$stage" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@${SOURCE_DATE_EPOCH:-0}" \
    -cf - "$name" | gzip -n >"$folder/$name.tar.gz"
"$root/scripts/wheel.sh" "$folder" >/dev/null
(cd "$folder" && sha256sum nccl_ep{,_deep_ep}-* | tee SHA256SUMS)
