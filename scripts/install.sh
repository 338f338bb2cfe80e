#!/usr/bin/env bash
# Installs the release build: both libraries, the header, the files by which pkg-config and CMake find
# them, and the licences; or removes what it has installed.
#
# Usage: install.sh install|uninstall [NAME=VALUE...], with GNU's names:
#   prefix=/usr/local  libdir=PREFIX/lib  includedir=PREFIX/include  docdir=PREFIX/share/doc/nccl_ep
#   DESTDIR=           the files are staged below it, for a package
#   versioned=0        1: the library's file is libnccl_ep.so.VERSION, and libnccl_ep.so a link to it
#   relocatable=0      1: pkg-config takes the prefix from the place of its file
# An empty value counts as not given.
set -euo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
root=$NCCL_EP_ROOT
die() {
    echo "install: $*" >&2
    exit 1
}

action=${1:-}
[[ $action == install || $action == uninstall ]] ||
    die "usage: install.sh install|uninstall [NAME=VALUE...]"
declare -A given=()
for word in "${@:2}"; do
    case $word in
        prefix=* | libdir=* | includedir=* | docdir=* | DESTDIR=* | versioned=* | relocatable=*)
            given[${word%%=*}]=${word#*=} ;;
        *) die "unknown setting $word" ;;
    esac
done
prefix=${given[prefix]:-/usr/local}
libdir=${given[libdir]:-$prefix/lib}
includedir=${given[includedir]:-$prefix/include}
docdir=${given[docdir]:-$prefix/share/doc/nccl_ep}
for name in prefix libdir includedir docdir; do
    [[ ${!name} == /* ]] || die "$name must be an absolute path, not ${!name}"
done
stage=${given[DESTDIR]:-}

version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -n1)
IFS=. read -r major minor _ <<<"$version"
library=libnccl_ep.so
[ "${given[versioned]:-0}" = 0 ] || library=libnccl_ep.so.$version
cmake=$libdir/cmake/nccl_ep

# What a package has besides the libraries.
files=("$includedir/nccl_ep.h" "$libdir/pkgconfig/nccl_ep.pc" "$cmake/nccl_ep-config.cmake"
    "$cmake/nccl_ep-config-version.cmake" "$docdir/LICENSE" "$docdir/THIRD-PARTY.txt")

uninstall() {
    rm -f "${files[@]/#/$stage}" "$stage$libdir"/libnccl_ep.{a,so}
    # Of any version: the one that is removed may be another than that of the sources.
    rm -f "$stage$libdir"/libnccl_ep.so.[0-9]*.[0-9]*.[0-9]*
    rmdir "$stage$cmake" "$stage$docdir" 2>/dev/null || true
    echo "removed nccl_ep from $stage$prefix"
}

# As pkg-config writes a folder: by the prefix where it is below it.
below_prefix() {
    local below=${prefix%/}
    if [[ $1 == "$below"/* ]]; then echo "\${prefix}${1#"$below"}"; else echo "$1"; fi
}

# fill TEMPLATE FILE: replaces the placeholders of a template.
fill() {
    local home=$prefix
    # pkg-config knows the folder of its file.
    [ "${given[relocatable]:-0}" = 0 ] ||
        home="\${pcfiledir}/$(realpath -ms --relative-to="$libdir/pkgconfig" "$prefix")"
    mkdir -p "$(dirname "$2")"
    sed -e "s|@PREFIX@|$home|g" -e "s|@VERSION@|$version|g" \
        -e "s|@LIBDIR@|$(below_prefix "$libdir")|g" \
        -e "s|@INCLUDEDIR@|$(below_prefix "$includedir")|g" \
        -e "s|@INCLUDE_FROM_CMAKE@|$(realpath -ms --relative-to="$cmake" "$includedir")|g" \
        -e "s|@VERSION_MAJOR@|$major|g" -e "s|@VERSION_MINOR@|$minor|g" \
        -e "s|@NATIVE_STATIC_LIBS@|$(cat "$root/packaging/native-static-libs")|g" \
        "$root/packaging/$1" >"$2"
    chmod 644 "$2"
}

install_all() {
    local libraries=${NCCL_EP_LIBRARIES:-$NCCL_EP_RELEASE} file
    # Root, who installs, often has no compiler, and would leave files in target/ that are not the
    # user's.
    for file in libnccl_ep.so libnccl_ep.a; do
        [ -f "$libraries/$file" ] || die "$libraries/$file is missing: run \`make lib\` first"
    done
    # A link there would have the file that it leads to overwritten.
    rm -f "$stage$libdir/libnccl_ep.so"
    install -D -m 755 "$libraries/libnccl_ep.so" "$stage$libdir/$library"
    [ "$library" = libnccl_ep.so ] || ln -s "$library" "$stage$libdir/libnccl_ep.so"
    install -D -m 644 "$libraries/libnccl_ep.a" "$stage$libdir/libnccl_ep.a"
    install -D -m 644 "$root/include/nccl_ep.h" "$stage$includedir/nccl_ep.h"
    fill nccl_ep.pc.in "$stage$libdir/pkgconfig/nccl_ep.pc"
    fill nccl_ep-config.cmake.in "$stage$cmake/nccl_ep-config.cmake"
    fill nccl_ep-config-version.cmake.in "$stage$cmake/nccl_ep-config-version.cmake"
    install -D -m 644 "$root/LICENSE" "$stage$docdir/LICENSE"
    if [ -f "$libraries/THIRD-PARTY.txt" ]; then
        install -m 644 "$libraries/THIRD-PARTY.txt" "$stage$docdir/THIRD-PARTY.txt"
    else
        "$root/scripts/third_party.py" "$stage$docdir/THIRD-PARTY.txt"
        chmod 644 "$stage$docdir/THIRD-PARTY.txt"
    fi
    echo "installed nccl_ep $version in $stage$prefix"
}

if [ "$action" = install ]; then install_all; else uninstall; fi
