#!/usr/bin/env bash
# Builds the Python package as a wheel that carries libnccl_ep.so and the CPU stand-ins, from the release build; the one
# that is named deep_ep; and a source distribution, which has neither library. Fetches nothing: setuptools is the one
# that `setup.sh --wheel` has pinned.
#
# Usage: wheel.sh FOLDER
set -euo pipefail
umask 022

. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
folder=${1:?usage: wheel.sh FOLDER}
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT

# A copy, so that neither the library nor what the build leaves behind gets into the sources, which may be read-only.
cp -r "$NCCL_EP_ROOT/python/." "$source"
chmod -R u=rwX,go=rX "$source"
cp "$NCCL_EP_ROOT/LICENSE" "$source"
cp "$NCCL_EP_ROOT/LICENSE" "$source/deep-ep"
# By this name setuptools takes it as a file of the licence.
"$NCCL_EP_ROOT/scripts/third_party.py" "$source/NOTICE-THIRD-PARTY.txt"
rm -rf "$source"/{tests,build,nccl_ep.egg-info}
export PYTHONPATH="$NCCL_EP_DEPS/wheel"
(
    absolute=$(realpath -m "$folder")
    cd "$source" && python3 -c "from setuptools.build_meta import build_sdist; build_sdist('$absolute')"
) >/dev/null
for library in libnccl_ep.so libncclep_hostsim.so; do
    install -D -m 755 "${NCCL_EP_LIBRARIES:-$NCCL_EP_RELEASE}/$library" "$source/nccl_ep/lib/$library"
    "${NCCL_EP_TOOLS}strip" --strip-unneeded "$source/nccl_ep/lib/$library"
done
# With a wheel of an older version beside it, `pip install nccl_ep-*.whl` refuses both. Those of other machines stay.
rm -f "$folder"/nccl_ep{-*"$NCCL_EP_MACHINE",_deep_ep-*}.whl
python3 -m pip --disable-pip-version-check wheel --quiet \
    --no-index --no-deps --no-build-isolation --wheel-dir "$folder" "$source" "$source/deep-ep"
ls "$folder"/nccl_ep{-*.whl,_deep_ep-*.whl,-*[0-9].tar.gz}
