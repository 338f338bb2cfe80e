#!/usr/bin/env bash
# Proves that the library drops in: a program linked with a dummy libnccl_ep.so of the same ten
# symbols does a real round trip on two ranks once ours takes the dummy's place, by LD_PRELOAD, by
# replacing the file, or by LD_LIBRARY_PATH; and that it fails while the dummy is in place.
#
# Usage: run.sh [LIBRARY_DIRECTORY], by default the release build's. Ends with "N passed, N failed".
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/../../../scripts/env.sh"
libraries=$(cd "${1:-$NCCL_EP_RELEASE}" && pwd)
. "$here/../checks.sh"

build() {
    local flags=(-O1 -Wall -Wextra -Wpedantic -Werror -I"$NCCL_EP_ROOT/include"
        -I"$here/../.." -isystem "$CUDA_HOME/include" -isystem "$NCCL_INCLUDE")
    local mpi_compile mpi_link
    read -ra mpi_compile <<<"$(mpicc --showme:compile)"
    read -ra mpi_link <<<"$(mpicc --showme:link)"
    mkdir "$work/dummy" "$work/with_rpath" "$work/no_rpath" "$work/objects"
    gcc -std=c11 "${flags[@]}" -fPIC -shared "$here/dummy.c" -o "$work/dummy/libnccl_ep.so"
    (cd "$work/objects" && flags+=(-DOMPI_SKIP_MPICXX "${mpi_compile[@]}") &&
        gcc -std=c11 "${flags[@]}" -c "$here/roundtrip.c" "$here"/../../{harness,reference}/*.c &&
        g++ -std=c++17 "${flags[@]}" -c "$here"/../../reference/*.cpp)
    # The stand-ins for CUDA and NCCL are found by their own rpath; ours is what the test varies.
    local link=("$work"/objects/*.o -L"$work/dummy" -lnccl_ep -L"$libraries" -lncclep_hostsim
        "${mpi_link[@]}" -lm -lpthread -ldl)
    cp "$libraries/libncclep_hostsim.so" "$work/with_rpath"
    cp "$work/dummy/libnccl_ep.so" "$work/with_rpath"
    cp "$libraries/libncclep_hostsim.so" "$work/no_rpath"
    g++ "${link[@]}" -o "$work/with_rpath/roundtrip" -Wl,-rpath,'$ORIGIN'
    g++ "${link[@]}" -o "$work/no_rpath/roundtrip"
}

# run NAME EXPECTED PROGRAM [VARIABLE=VALUE...]: two ranks, the variables set in the program only.
# EXPECTED "works" wants its closing line and no word of the dummy; "dummy" wants the failure.
run() {
    check "$1" ends "${@:2}"
}

ends() {
    local expected=$1 program=$2 status=0 outcome
    shift 2
    timeout 60 mpirun -np 2 env "$@" "$program" >"$work/output" 2>&1 || status=$?
    cat "$work/output"
    if [ $status = 0 ] && grep -Eq '^[1-9][0-9]* passed, 0 failed$' "$work/output" &&
        ! grep -q '^dummy:' "$work/output"; then
        outcome=works
    elif [ $status != 0 ] && grep -q '^dummy: ncclEpCreateGroup$' "$work/output"; then
        outcome=dummy
    else
        outcome="neither (status $status)"
    fi
    echo "expected '$expected', got '$outcome'"
    [ "$outcome" = "$expected" ]
}

build
ours=$libraries/libnccl_ep.so
program=$work/with_rpath/roundtrip
run "the dummy by itself fails" dummy "$program"
run "LD_PRELOAD" works "$program" LD_PRELOAD="$ours"
run "LD_LIBRARY_PATH leads to the dummy" dummy "$work/no_rpath/roundtrip" \
    LD_LIBRARY_PATH="$work/dummy:$work/no_rpath"
run "LD_LIBRARY_PATH leads to ours" works "$work/no_rpath/roundtrip" LD_LIBRARY_PATH="$libraries"
cp "$ours" "$work/with_rpath/libnccl_ep.so"
run "the file replaced" works "$program"
finish
