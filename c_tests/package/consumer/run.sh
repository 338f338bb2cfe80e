#!/usr/bin/env bash
# Proves that an installed library is found and usable: installs it into a scratch directory, then
# builds and runs two programs through pkg-config and through CMake, shared and static each.
#
# Usage: run.sh [LIBRARY_DIRECTORY], by default the release build's. Ends with "N passed, N failed".
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/../../../scripts/env.sh"
. "$here/../checks.sh"
libraries=$(cd "${1:-$NCCL_EP_RELEASE}" && pwd)
prefix=$work/prefix
export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$NCCL_EP_ROOT/Cargo.toml" | head -n1)


expected_files="include/nccl_ep.h
include/nccl_ep.hpp
include/nccl_ep_2/nccl_ep.h
include/nccl_ep_2/nccl_ep/ep_enums.h
lib/cmake/nccl_ep/nccl_ep-config-version.cmake
lib/cmake/nccl_ep/nccl_ep-config.cmake
lib/cmake/nccl_ep_2/nccl_ep_2-config-version.cmake
lib/cmake/nccl_ep_2/nccl_ep_2-config.cmake
lib/libnccl_ep.a
lib/libnccl_ep.so
lib/nccl_ep_2/include
lib/nccl_ep_2/lib/libnccl_ep.so
lib/nccl_ep_2/lib/libnccl_ep.so.0
lib/nccl_ep_2/libnccl_ep.a
lib/nccl_ep_2/libnccl_ep.so
lib/nccl_ep_2/libnccl_ep.so.0
lib/nccl_ep_2/libnccl_ep.so.0.2.0
lib/pkgconfig/nccl_ep.pc
lib/pkgconfig/nccl_ep_2.pc
share/doc/nccl_ep/LICENSE
share/doc/nccl_ep/THIRD-PARTY.txt"

files_are() {
    diff <(cd "$1" && find . ! -type d | sed 's|^\./||' | LC_ALL=C sort) \
        <([ -z "$2" ] || echo "$2")
}

installs() { make_install install "$@"; }
make_install() { NCCL_EP_LIBRARIES=$libraries make -s -C "$NCCL_EP_ROOT" "$@"; }

# With DESTDIR the files are staged, and name the place where they will be in the end. All may read them.
stages() {
    (umask 077 && installs PREFIX=/opt/ep DESTDIR="$work/stage") &&
        files_are "$work/stage/opt/ep" "$expected_files" &&
        [ -z "$(find "$work/stage/opt/ep" ! -perm -o=r)" ] &&
        grep -qx 'prefix=/opt/ep' "$work/stage/opt/ep/lib/pkgconfig/nccl_ep.pc"
}

# GNU's names: libraries and header in folders of their own, from which CMake and pkg-config find them.
elsewhere="prefix=$work/else libdir=$work/else/lib64/ep includedir=$work/headers VERSIONED=1"
installs_elsewhere() {
    installs $elsewhere && [ -f "$work/headers/nccl_ep.h" ] &&
        [ "$(readlink "$work/else/lib64/ep/libnccl_ep.so")" = "libnccl_ep.so.$version" ] &&
        [ "$(PKG_CONFIG_PATH=$work/else/lib64/ep/pkgconfig pkg-config --cflags --libs nccl_ep)" = \
            "-I$work/headers -L$work/else/lib64/ep -lnccl_ep " ] &&
        cmake -S "$here" -B "$work/cmake-else" -DHOSTSIM_DIRECTORY="$libraries" \
            -Dnccl_ep_DIR="$work/else/lib64/ep/cmake/nccl_ep" -DEXPECTED_VERSION="$version" &&
        cmake --build "$work/cmake-else" --target plain_nccl_ep && "$work/cmake-else/plain_nccl_ep"
}

# Names in capitals do what GNU's do, each of them, in both directions.
in_capitals="PREFIX=/opt/ep LIBDIR=/opt/ep/lib64 INCLUDEDIR=/usr/headers DOCDIR=/opt/doc"
takes_capitals() {
    installs DESTDIR="$work/gnu" prefix=/opt/ep libdir=/opt/ep/lib64 includedir=/usr/headers docdir=/opt/doc &&
        installs DESTDIR="$work/capitals" $in_capitals &&
        diff -r "$work/gnu" "$work/capitals" && [ -f "$work/capitals/opt/ep/lib64/libnccl_ep.so" ] &&
        [ -f "$work/capitals/usr/headers/nccl_ep.h" ] && [ -f "$work/capitals/opt/doc/LICENSE" ] &&
        make_install uninstall DESTDIR="$work/capitals" $in_capitals && files_are "$work/capitals" ""
}

# Whoever installs over a link must not overwrite the file that it leads to.
installs_over_a_link() {
    installs prefix="$work/else" libdir="$work/else/lib64/ep" includedir="$work/headers" &&
        [ ! -L "$work/else/lib64/ep/libnccl_ep.so" ]
}

# What another library has put there stays, though its name is like ours; an earlier version of ours goes with its link.
uninstalls() {
    local libs=$work/else/lib64/ep
    mv "$libs/libnccl_ep.so" "$libs/libnccl_ep.so.0.0.9" && ln -s libnccl_ep.so.0.0.9 "$libs/libnccl_ep.so" &&
        touch "$libs/libnccl_ep.so.9.9.9" && make_install uninstall $elsewhere &&
        files_are "$work/else" lib64/ep/libnccl_ep.so.9.9.9 && files_are "$work/headers" ""
}

# Letters of a folder that mean more to shells, sed, bash or pkg-config.
goes_anywhere() {
    local odd="$work/a b&c|d\\e" stage="$work/s t&u" below flags
    installs prefix="$odd" DESTDIR="$stage" || return 1
    for below in "" /nccl_ep_2; do
        flags=$(PKG_CONFIG_PATH="$stage$odd/lib/pkgconfig" pkg-config --cflags --libs "nccl_ep${below#/nccl_ep}") &&
            eval "flags=($flags)" && [ "${flags[*]::2}" = "-I$odd/include$below -L$odd/lib$below" ] || return 1
    done
    make_install uninstall prefix="$odd" DESTDIR="$stage" && files_are "$stage" ""
}

# Without headers of CUDA or NCCL anywhere the package says what to set.
names_missing_headers() {
    ! env -u CUDA_HOME -u NCCL_INCLUDE -u NCCL_HOME cmake -S "$here" -B "$work/no-cuda" \
        -DCMAKE_PREFIX_PATH="$prefix" -DHOSTSIM_DIRECTORY="$libraries" -DEXPECTED_VERSION="$version" \
        -DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON \
        -DCMAKE_FIND_ROOT_PATH="$work/empty" -DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY \
        >"$work/missing" 2>&1 && grep -q "No cuda_runtime.h" "$work/missing" &&
        grep -q "No nccl.h" "$work/missing"
}

pkg_config_build() {
    local source=$1 output=$2 flags
    shift 2
    read -ra flags <<<"$*"
    gcc -std=c11 -Wall -Wextra -Werror "$here/$source" -o "$work/$output" \
        -isystem "$CUDA_HOME/include" -isystem "$NCCL_INCLUDE" "${flags[@]}"
}

# The static library is asked for by its file name; Libs.private brings what it needs.
shared_flags() { pkg-config --cflags --libs nccl_ep; }
static_flags() { pkg-config --cflags --libs --static nccl_ep | sed 's/-lnccl_ep/-l:libnccl_ep.a/'; }
hostsim_flags="-L$libraries -lncclep_hostsim -Wl,-rpath,$libraries"

needs_shared() { readelf -d "$1" | grep -q 'NEEDED.*\[libnccl_ep\.so\]'; }
needs_no_shared() { [ -x "$1" ] && ! needs_shared "$1"; }

# The release build's directory holds our library too: the installed copy must be the one found.
runs() { env LD_LIBRARY_PATH="$prefix/lib" timeout 60 "$@"; }

with_pkg_config() {
    check "pkg-config: version" test "$(pkg-config --modversion nccl_ep)" = "$version"
    local program
    for program in plain one_rank; do
        local extra=""
        [ $program = plain ] || extra=$hostsim_flags
        check "pkg-config: build $program, shared" \
            pkg_config_build $program.c "$program.so" "$(shared_flags)" "$extra"
        check "pkg-config: $program, shared, needs the library" needs_shared "$work/$program.so"
        check "pkg-config: run $program, shared" runs "$work/$program.so"
        check "pkg-config: build $program, static" \
            pkg_config_build $program.c "$program.a" "$(static_flags)" "$extra"
        check "pkg-config: $program, static, needs no library" needs_no_shared "$work/$program.a"
        check "pkg-config: run $program, static" "$work/$program.a"
    done
}

# The later interface has a package of its own, nccl_ep_2, with the same names of files inside.
later_flags() {
    pkg-config --cflags --libs $1 nccl_ep_2 | { [ -z "$1" ] && cat || sed 's/-l:libnccl_ep.so.0/-l:libnccl_ep.a/'; }
}
later_by_cmake() {
    cmake -S "$here" -B "$work/cmake-later" -DCMAKE_PREFIX_PATH="$prefix" -DLATER=ON &&
        cmake --build "$work/cmake-later" && "$work/cmake-later/later_nccl_ep" &&
        "$work/cmake-later/later_nccl_ep_static"
}
needs_later() { readelf -d "$1" | grep -q 'NEEDED.*\[libnccl_ep\.so\.0\]'; }

# As TransformerEngine's library looks for it by NCCL_EP_HOME, and as sources that are built with it link.
is_a_home() {
    readelf -d "$1/lib/libnccl_ep.so.0" | grep -q 'SONAME.*\[libnccl_ep\.so\.0\]' &&
        [ -f "$1/include/nccl_ep/ep_enums.h" ]
}
home_flags() { echo "-I$1/include -L$1/lib -lnccl_ep"; }

with_later_interface() {
    check "later: a home" is_a_home "$prefix/lib/nccl_ep_2"
    check "later: version" test "$(pkg-config --modversion nccl_ep_2)" = 0.2.0
    check "later: build, shared" pkg_config_build later.c later.so "$(later_flags "")"
    check "later: needs the library" needs_later "$work/later.so"
    check "later: run, shared" env LD_LIBRARY_PATH="$prefix/lib/nccl_ep_2" "$work/later.so"
    check "later: build, behind the other folder" pkg_config_build later.c later.so "-L$prefix/lib $(later_flags "")"
    check "later: needs the library there, too" needs_later "$work/later.so"
    check "later: build with a home" pkg_config_build later.c later.so "$(home_flags "$prefix/lib/nccl_ep_2")"
    check "later: needs the library of the home" needs_later "$work/later.so"
    check "later: build, static" pkg_config_build later.c later.a "$(later_flags --static)"
    check "later: run, static" "$work/later.a"
    check "later: cmake" later_by_cmake
}

# configure VERSION DIRECTORY
configure() {
    cmake -S "$here" -B "$2" -DCMAKE_PREFIX_PATH="$prefix" -DHOSTSIM_DIRECTORY="$libraries" \
        -DEXPECTED_VERSION="$1"
}

refuses_version() {
    ! configure "$1" "$work/other" >"$work/refusal" 2>&1 &&
        grep -q "requested version \"$1\"" "$work/refusal"
}

with_cmake() {
    check "cmake: configure" configure "$version" "$work/cmake"
    check "cmake: build" cmake --build "$work/cmake"
    local program
    for program in plain one_rank; do
        check "cmake: run $program, shared" "$work/cmake/${program}_nccl_ep"
        check "cmake: $program, static, needs no library" \
            needs_no_shared "$work/cmake/${program}_nccl_ep_static"
        check "cmake: run $program, static" "$work/cmake/${program}_nccl_ep_static"
    done
    check "cmake: a version that is not there" refuses_version 99.0.0
    check "cmake: no headers of CUDA" names_missing_headers
}

check "install" installs prefix="$prefix"
check "install: exactly the files of the package" files_are "$prefix" "$expected_files"
check "install: DESTDIR" stages
check "install: folders of its own, a versioned file" installs_elsewhere
check "install: names in capitals" takes_capitals
check "install: over a link" installs_over_a_link
check "uninstall" uninstalls
check "install: folders of any name" goes_anywhere
with_pkg_config
with_cmake
with_later_interface
finish
