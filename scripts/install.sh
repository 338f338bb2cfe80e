#!/usr/bin/env bash
# Installs the release build: for each of the two interfaces the libraries, the headers, and the files by which
# pkg-config and CMake find them; and the licences. Or removes what it has installed. The later interface has the same
# names of headers and libraries, so they are in folders of their own, nccl_ep_2.
#
# Usage: install.sh install|uninstall [NAME=VALUE...], with GNU's names:
#   prefix=/usr/local  libdir=PREFIX/lib  includedir=PREFIX/include  docdir=PREFIX/share/doc/nccl_ep
#   DESTDIR=           the files are staged below it, for a package
#   versioned=0        1: the library's file is libnccl_ep.so.VERSION, and libnccl_ep.so a link to it
#   relocatable=0      1: pkg-config takes the prefix from the place of its file
# An empty value counts as not given.
set -euo pipefail
umask 022  # other users read what root installs

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
library=libnccl_ep.so
[ "${given[versioned]:-0}" = 0 ] || library=libnccl_ep.so.$version
later=$libdir/nccl_ep_2
later_headers=$includedir/nccl_ep_2

# What a package has besides the libraries.
files=("$includedir"/nccl_ep.{h,hpp} "$docdir/LICENSE" "$docdir/THIRD-PARTY.txt" "$later_headers/nccl_ep.h"
    "$later_headers/nccl_ep/ep_enums.h")
for package in nccl_ep nccl_ep_2; do
    files+=("$libdir/pkgconfig/$package.pc" "$libdir/cmake/$package/$package-config.cmake"
        "$libdir/cmake/$package/$package-config-version.cmake")
done

uninstall() {
    # What is removed may be of another version than the sources; other files of such a name may be NVIDIA's.
    local target
    target=$(readlink "$stage$libdir/libnccl_ep.so" || true)
    [[ $target != libnccl_ep.so.[0-9]*.[0-9]*.[0-9]* ]] || rm -f "$stage$libdir/$target"
    rm -f "${files[@]/#/"$stage"}" "$stage$libdir"/libnccl_ep.{a,so,so."$version"}
    rm -f "$stage$later"/{include,lib/libnccl_ep.so{,.0},libnccl_ep.{a,so,so.0}} \
        "$stage$later"/libnccl_ep.so.[0-9]*.[0-9]*.[0-9]*
    rmdir "$stage$libdir"/cmake/nccl_ep{,_2} "$stage$later"{/lib,} "$stage$later_headers"/{nccl_ep,} "$stage$docdir" \
        2>/dev/null || true
    echo "removed nccl_ep from $stage$prefix"
}

# As pkg-config reads a folder, which may have blanks.
escaped() { sed "s/[[:blank:]\\\\\"'#]/\\\\&/g" <<<"$1"; }
# As it writes one: by the prefix where it is below it.
below_prefix() {
    local below=${prefix%/}
    if [[ $1 == "$below"/* ]]; then echo "\${prefix}$(escaped "${1#"$below"}")"; else escaped "$1"; fi
}

# describe PACKAGE VERSION FILE LIBDIR INCLUDEDIR: the files by which pkg-config and CMake find a package, whose shared
# library has this file.
describe() {
    local package=$1 of=$2 file=$3 libs=$4 headers=$5 cmake=$libdir/cmake/$1 home target name text
    local soname=libnccl_ep.so link=-lnccl_ep
    # Behind the folder of the other library -lnccl_ep would be that one.
    [ "$package" = nccl_ep ] || { soname=libnccl_ep.so.0 && link=-l:$soname; }
    home=$(escaped "$prefix")
    # pkg-config knows the folder of its file.
    [ "${given[relocatable]:-0}" = 0 ] ||
        home="\${pcfiledir}/$(realpath -ms --relative-to="$libdir/pkgconfig" "$prefix")"
    local -A values=(
        [PACKAGE]=$package [PREFIX]=$home [VERSION]=$of [FILE]=$file [SONAME]=$soname [LINK]=$link
        [LIBDIR]=$(below_prefix "$libs") [INCLUDEDIR]=$(below_prefix "$headers")
        [LIBDIR_FROM_CMAKE]=$(realpath -ms --relative-to="$cmake" "$libs")
        [INCLUDE_FROM_CMAKE]=$(realpath -ms --relative-to="$cmake" "$headers")
        [VERSION_MAJOR]=$(cut -d. -f1 <<<"$of") [VERSION_MINOR]=$(cut -d. -f2 <<<"$of")
        [NATIVE_STATIC_LIBS]=$(cat "$root/packaging/native-static-libs")
    )
    for target in "$libdir/pkgconfig/$package.pc" "$cmake/$package-config.cmake" \
        "$cmake/$package-config-version.cmake"; do
        local template=${target##*/}
        mkdir -p "$stage$(dirname "$target")"
        text=$(<"$root/packaging/${template/#$package/nccl_ep}.in")
        # Not by sed, to which some letters of a folder would mean more.
        for name in "${!values[@]}"; do text=${text//@$name@/"${values[$name]}"}; done
        echo "$text" >"$stage$target"
        chmod 644 "$stage$target"
    done
}

install_later() {
    local libraries=$1 headers=$root/include/nccl_ep_2 of file
    of=$(sed -n 's/^#define NCCL_EP_\(MAJOR\|MINOR\|PATCH\) //p' "$headers/nccl_ep.h" | paste -sd.)
    file=libnccl_ep.so.$of
    install -D -m 755 "$libraries/libnccl_ep_2.so" "$stage$later/$file"
    ln -sf "$file" "$stage$later/libnccl_ep.so.0"
    ln -sf libnccl_ep.so.0 "$stage$later/libnccl_ep.so"
    # The folder is what programs look for by NCCL_EP_HOME, and link with: lib/ with the library, include/nccl_ep/ with
    # any header.
    mkdir -p "$stage$later/lib"
    ln -sf ../libnccl_ep.so.0 "$stage$later/lib/libnccl_ep.so.0"
    ln -sf libnccl_ep.so.0 "$stage$later/lib/libnccl_ep.so"
    ln -sfn "$(realpath -ms --relative-to="$later" "$later_headers")" "$stage$later/include"
    install -D -m 644 "$libraries/libnccl_ep_2.a" "$stage$later/libnccl_ep.a"
    install -D -m 644 "$headers/nccl_ep.h" "$stage$later_headers/nccl_ep.h"
    install -D -m 644 "$headers/nccl_ep/ep_enums.h" "$stage$later_headers/nccl_ep/ep_enums.h"
    describe nccl_ep_2 "$of" "$file" "$later" "$later_headers"
}

install_all() {
    local libraries=${NCCL_EP_LIBRARIES:-$NCCL_EP_RELEASE} file
    # Root, who installs, often has no compiler, and would leave files in target/ that are not the user's.
    for file in libnccl_ep{,_2}.{so,a}; do
        [ -f "$libraries/$file" ] || die "$libraries/$file is missing: run \`make lib\` first"
    done
    # A link there would have the file that it leads to overwritten.
    rm -f "$stage$libdir/libnccl_ep.so"
    install -D -m 755 "$libraries/libnccl_ep.so" "$stage$libdir/$library"
    [ "$library" = libnccl_ep.so ] || ln -s "$library" "$stage$libdir/libnccl_ep.so"
    install -D -m 644 "$libraries/libnccl_ep.a" "$stage$libdir/libnccl_ep.a"
    for file in nccl_ep.h nccl_ep.hpp; do
        install -D -m 644 "$root/include/$file" "$stage$includedir/$file"
    done
    describe nccl_ep "$version" libnccl_ep.so "$libdir" "$includedir"
    install_later "$libraries"
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
