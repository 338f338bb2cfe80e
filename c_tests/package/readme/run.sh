#!/usr/bin/env bash
# Proves that what README says works as it stands there: the program in Python, the commands that install and
# compile, the lines for CMake, the pieces of C, those of C++ in docs/guide/cpp.md; and the commands of docs/python.md
# for a machine without a GPU.
#
# The library is built already, so `cargo build` does nothing here; `sudo` runs its command, DESTDIR keeps the
# installation away from the machine, and NCCL_HOME has the CPU stand-ins under NCCL's name.
#
# Usage: run.sh [LIBRARY_DIRECTORY], by default the release build's. Ends with "N passed, N failed".
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/../../../scripts/env.sh"
. "$here/../checks.sh"
libraries=$(cd "${1:-$NCCL_EP_RELEASE}" && pwd)
program=$here/../consumer/one_rank.c

# block LANGUAGE WORD [DOCUMENT]: the first block of this language that has this word, in README.
block() {
    python3 - "$NCCL_EP_ROOT/${3:-README.md}" "$1" "$2" <<'PYTHON'
import re, sys

text = open(sys.argv[1]).read()
blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
print(next(code for name, code in blocks if name == sys.argv[2] and sys.argv[3] in code), end="")
PYTHON
}

mkdir -p "$work"/{bin,nccl/lib,app,cmake,piece}
printf '#!/bin/sh\n[ "$1" = build ] || exec "%s" "$@"\n' "$(command -v cargo)" >"$work/bin/cargo"
printf '#!/bin/sh\nexec "$@"\n' >"$work/bin/sudo"
chmod 755 "$work"/bin/*
ln -s "$libraries/libncclep_hostsim.so" "$work/nccl/lib/libnccl.so.2"
ln -s "$NCCL_INCLUDE" "$work/nccl/include"
export NCCL_HOME=$work/nccl

# The stand-ins take the place of the CUDA runtime, too.
runs() {
    LD_LIBRARY_PATH="$work/stage/usr/local/lib:$CUDA_HOME/lib" timeout 60 \
        env LD_PRELOAD="$libraries/libncclep_hostsim.so" "$1"
}

# A copy of the sources' folder, with what was built and fetched.
for entry in "$NCCL_EP_ROOT"/* "$NCCL_EP_DEPS"; do ln -s "$entry" "$work/app/"; done
ln -sfn "$NCCL_EP_TARGET" "$work/app/target"

commands() {
    cp "$program" "$work/app/app.c"
    block "" "cc app.c" >"$work/commands"
    (cd "$work/app" && PATH="$work/bin:$PATH" DESTDIR="$work/stage" CARGO_TARGET_DIR="$NCCL_EP_TARGET" \
        PKG_CONFIG_PATH="$work/stage/usr/local/lib/pkgconfig" PKG_CONFIG_SYSROOT_DIR="$work/stage" \
        bash -euo pipefail "$work/commands") && runs "$work/app/app"
}

lines_for_cmake() {
    cp "$program" "$work/cmake/app.c"
    {
        printf 'cmake_minimum_required(VERSION 3.18)\nproject(app LANGUAGES C)\nadd_executable(app app.c)\n'
        block cmake find_package
    } >"$work/cmake/CMakeLists.txt"
    cmake -S "$work/cmake" -B "$work/cmake/build" -DCUDAToolkit_ROOT="$CUDA_HOME" \
        -DCMAKE_PREFIX_PATH="$work/stage/usr/local" && cmake --build "$work/cmake/build" &&
        runs "$work/cmake/build/app"
}

# A piece of C within a function; it may use the words of the header's documentation.
piece() {
    {
        printf '#include <nccl_ep.h>\n#include <stdio.h>\n'
        printf 'void piece(ncclEpHandle_t handle, const ncclNDTensor_t* const* inputs, ncclNDTensor_t rows,\n'
        printf '           ncclNDTensor_t scales, cudaStream_t stream, ncclResult_t result) {\n'
        block c "$1"
        printf '}\n'
    } >"$work/piece/piece.c"
    gcc -std=c11 -Wall -Werror -fsyntax-only "$work/piece/piece.c" -I"$NCCL_EP_ROOT/include" \
        -isystem "$CUDA_HOME/include" -isystem "$NCCL_INCLUDE"
}

# The pieces of C++, one behind the other.
pieces_of_cpp() {
    local standard
    {
        printf '#include <nccl_ep.hpp>\n#include <cstdio>\n'
        printf 'ncclResult_t piece(ncclComm_t comm, cudaStream_t stream, std::int64_t* ids, void* input,\n'
        printf '                   void* received, std::int32_t* counts, unsigned num_tokens, unsigned top_k,\n'
        printf '                   unsigned hidden, unsigned local_experts, unsigned num_slots) {\n'
        block cpp group_config docs/guide/cpp.md
        block cpp fprintf docs/guide/cpp.md
        printf 'return ncclSuccess;\n}\n'
    } >"$work/piece/piece.cpp"
    for standard in c++17 c++20; do
        g++ -std=$standard -Wall -Wextra -Werror -fsyntax-only "$work/piece/piece.cpp" -I"$NCCL_EP_ROOT/include" \
            -isystem "$CUDA_HOME/include" -isystem "$NCCL_INCLUDE" || return 1
    done
}

# In the sources themselves if all is there: to Python a copy of PyTorch's folder is another one, which four ranks would
# compile anew.
without_gpu() {
    local sources=$NCCL_EP_ROOT
    [ "$NCCL_EP_TARGET $NCCL_EP_DEPS" = "$sources/target $sources/.deps" ] || sources=$work/app
    block "" "04_moe_layer" docs/python.md >"$work/python"
    (cd "$sources" && unset CUDA_HOME NCCL_INCLUDE NCCL_HOME &&
        NCCLEP_HOSTSIM_WITH_GPU=1 PATH="$work/bin:$PATH" timeout 120 bash -euo pipefail "$work/python") &&
        grep -q '^PASSED' "$work/log"
}

program_in_python() {
    block python "import os" >"$work/app/moe.py"
    block "" "torch.distributed.run" >"$work/python"
    (cd "$work/app" && unset NCCL_HOME && PATH="$work/bin:$PATH" PYTHONPATH=$NCCL_EP_DEPS/torch OMP_NUM_THREADS=1 \
        NCCLEP_HOSTSIM_WITH_GPU=1 timeout 120 bash -euo pipefail "$work/python") &&
        [ "$(grep -o '16 went home' "$work/log" | wc -l)" = 2 ] # lines of ranks may run together
}

check "the program in Python" program_in_python
check "the commands" commands
check "Python without a GPU" without_gpu
check "the lines for CMake" lines_for_cmake
check "the text of a refusal" piece ncclEpGetLastError
check "FP8" piece scales
check "C++" pieces_of_cpp
finish
