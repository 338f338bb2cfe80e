#!/usr/bin/env bash
# Builds the Python package as a wheel that carries libnccl_ep.so, from the release build.
#
# Usage: wheel.sh FOLDER [OPTION...]. The options go to pip, such as --no-build-isolation.
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
folder=${1:?usage: wheel.sh FOLDER [OPTION...]}
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT

# A copy, so that neither the library nor what the build leaves behind gets into the sources.
cp -r "$NCCL_EP_ROOT/python/." "$source"
cp "$NCCL_EP_ROOT/LICENSE" "$source"
rm -rf "$source"/{tests,build,nccl_ep.egg-info}
install -D -m 755 "$NCCL_EP_TARGET/release/libnccl_ep.so" "$source/nccl_ep/lib/libnccl_ep.so"
python3 -m pip wheel --quiet --no-deps --wheel-dir "$folder" "${@:2}" "$source"
ls "$folder"/nccl_ep-*.whl
