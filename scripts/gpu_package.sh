#!/usr/bin/env bash
# Gathers what a machine with GPUs but without compilers needs to run the C programs: stripped
# programs, the libraries, the runner. Takes a folder, which is made anew:
#   gpu/ onegpu/  programs over NCCL, and over c_tests/fake_nccl
#   lib/          libnccl_ep.so, libncclep_fake_nccl.so, libnccl-net-ep-test.so
#   second/       libnccl_ep.so.0, the later interface
#   python/ examples/ .deps/pytest/  the Python package with its tests; PyTorch is the machine's
#   .deps/engines/                   what `make test-engines` has fetched, if it has
#   bench/layer.py                   times an MoE layer
#   bench/run_sweep.py               times ep_bench: DIR/bench/run_sweep.py --prebuilt DIR
#   scripts/      DIR/scripts/gpu_test.py --prebuilt DIR
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/env.sh

if [ $# != 1 ]; then
    echo "usage: gpu_package.sh DIR" >&2
    exit 2
fi
package=$1
if [ -e "$package" ] && [ ! -d "$package/onegpu" ]; then
    echo "$package is something else; it is not overwritten" >&2
    exit 1
fi
rm -rf "$package"
mkdir -p "$package"/{gpu,onegpu,lib,second,scripts/testing}

for kind in gpu onegpu; do
    for program in "$NCCL_EP_TARGET/c/$kind"/*; do
        strip -o "$package/$kind/$(basename "$program")" "$program"
    done
done
strip --strip-unneeded -o "$package/lib/libnccl_ep.so" "$NCCL_EP_RELEASE/libnccl_ep.so"
strip --strip-unneeded -o "$package/second/libnccl_ep.so.0" "$NCCL_EP_RELEASE/libnccl_ep_2.so"
strip --strip-unneeded -o "$package/lib/libncclep_fake_nccl.so" \
    "$NCCL_EP_TARGET/c/fake_nccl/gpu/libncclep_fake_nccl.so"
strip --strip-unneeded -o "$package/lib/libnccl-net-ep-test.so" \
    "$NCCL_EP_TARGET/c/lib/libnccl-net-ep-test.so"
cp scripts/{env.sh,gpus.py,gpu_test.py,on_nodes.sh} "$package/scripts/"
cp scripts/testing/*.py "$package/scripts/testing/"
mkdir -p "$package"/{bench,examples,docs}
cp docs/{abi,python}.md "$package/docs/" # tests compare the structures with one, run the other's code
cp README.md "$package/"
cp -r python "$package/"
cp -r examples/python "$package/examples/"
cp bench/{layer,run_sweep,rows}.py "$package/bench/"
mkdir "$package/.deps"
for part in pytest engines; do
    if [ -d "$NCCL_EP_DEPS/$part" ]; then cp -r "$NCCL_EP_DEPS/$part" "$package/.deps/"; fi
done
chmod -R u+w "$package"
echo "$package: $(du -sm "$package" | cut -f1) MB"
