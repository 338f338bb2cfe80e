#!/usr/bin/env bash
# Installs what building and testing need beyond Rust, gcc, make and python3 with pip, and only what is missing.
#
# System packages (Open MPI, g++, pkg-config) come from apt. The CUDA compiler, NCCL's headers and
# CMake come as wheels whose hashes are pinned in the *.lock files beside this script, into the
# ignored folder .deps/. A stamp with the hash of the lock file marks a finished install, so a
# second run does nothing and says nothing. env.sh decides which copies are used.
#
# Options, which may be combined:
#   --library  only what the library itself needs: neither Open MPI nor NCCL's headers
#   --gpu      also NCCL's library, on a machine that has GPUs but no libnccl.so.2
#   --demo     as --gpu; without a GPU only what the demonstration needs there, which is no compiler
#   --pytest   also pytest, for the tests of the Python package with the machine's own PyTorch
#   --docs     also Sphinx, which makes the site of the documents
#   --python   also all that tests in Python need: pytest, PyTorch, mypy, Sphinx, the nccl.ep package
#   --wheel    also setuptools, which builds the wheel of the Python package
#   --emulator also what builds and runs C programs for the machine of CARGO_BUILD_TARGET, if it is another one
#   --plots    only matplotlib, which draws docs/plots/ (x86-64, Python 3.11 to 3.13)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/env.sh
. "$here/env.sh"

scratch=""
trap '[ -z "$scratch" ] || rm -rf "$scratch"' EXIT

say() { echo "setup: $*"; }
die() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

# True if option $1 was given.
options=" $* "
wants() { [[ $options == *" $1 "* ]]; }

# --- System packages ------------------------------------------------------------------------------

# Prints the Debian packages of the tools that are not there.
missing_packages() {
    command -v g++ >/dev/null || echo g++
    python3 -m pip --version >/dev/null 2>&1 || echo python3-pip
    local cross=${NCCL_EP_TOOLS//_/-}
    [ -z "$cross" ] || command -v "${NCCL_EP_TOOLS}gcc" >/dev/null || echo "gcc-${cross%-}"
    if [ -n "$cross" ] && wants --emulator; then
        command -v "${NCCL_EP_TOOLS}g++" >/dev/null || echo "g++-${cross%-}"
        command -v "qemu-$NCCL_EP_MACHINE" >/dev/null || echo qemu-user
    fi
    wants --library && return
    command -v mpirun >/dev/null || echo openmpi-bin
    command -v mpicc >/dev/null || echo libopenmpi-dev
    command -v pkg-config >/dev/null || echo pkg-config
}

# Prints the command that runs another one as root; fails if there is none.
as_root() {
    if [ "$(id -u)" = 0 ]; then
        echo env
    elif command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
        echo sudo
    else
        return 1
    fi
}

install_packages() {
    local packages root
    packages=$(missing_packages | paste -sd' ')
    [ -n "$packages" ] || return 0
    command -v apt-get >/dev/null ||
        die "missing: $packages (Debian's names), and there is no apt-get here." \
            "Install them in another way, Open MPI with its compiler wrappers; then try again."
    root=$(as_root) ||
        die "missing: $packages. Run this as root, then try again:" \
            "  apt-get update && apt-get install -y $packages"
    say "installing $packages (apt)"
    $root apt-get -qq -o Acquire::Retries=3 update
    # shellcheck disable=SC2086 # the packages are words
    $root env DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o Acquire::Retries=3 \
        -o Dpkg::Use-Pty=0 install --no-install-recommends $packages >/dev/null </dev/null
}

# For another machine.
install_rust_library() {
    cd "$NCCL_EP_ROOT" # whose rust-toolchain.toml counts
    [ -n "$NCCL_EP_TOOLS" ] || return 0
    [ ! -d "$(rustc --print target-libdir --target "$CARGO_BUILD_TARGET")" ] || return 0
    command -v rustup >/dev/null || die "no library of Rust for $CARGO_BUILD_TARGET, and no rustup to fetch it"
    say "fetching Rust's library for $CARGO_BUILD_TARGET (rustup)"
    rustup --quiet target add "$CARGO_BUILD_TARGET" || die "rustup could not fetch it"
}

check_mpi() {
    [[ $(mpirun --version 2>/dev/null) == *"Open MPI"* ]] ||
        die "the mpirun in PATH is not Open MPI's, on whose settings the tests rely." \
            "Put Open MPI 4.1 or newer first in PATH."
}

# --- Pinned wheels --------------------------------------------------------------------------------

lock_hash() { sha256sum "$here/$1" | cut -d' ' -f1; }

# True if .deps/$1 was made from lock file $2 as it is now.
is_current() { [ "$(cat "$NCCL_EP_DEPS/$1/.stamp" 2>/dev/null)" = "$(lock_hash "$2")" ]; }

# Runs pip with the settings that a user's own configuration must not change. --no-deps, because
# the lock files are complete and nvcc's unpinned requirements would bring newer parts than its own.
run_pip() {
    local log
    log=$(PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 PIP_DISABLE_PIP_VERSION_CHECK=1 \
        python3 -m pip "$1" --quiet --no-deps --no-cache-dir --only-binary=:all: \
        --require-hashes "${@:2}" 2>&1) ||
        die "pip could not fetch the wheels that ${*: -1} lists:" "$log" \
            "pip was to write under .deps/ only. Should it refuse because the system manages this" \
            "Python (PEP 668), use a virtual environment: python3 -m venv V && . V/bin/activate"
}

# install_wheels NAME UNPACK [LOCK]: fills .deps/NAME from LOCK, which is NAME-requirements.lock if
# it is not given. Function UNPACK gets a scratch directory beside the final place and the lock file;
# an interrupted run leaves nothing that looks finished.
install_wheels() {
    local name=$1 lock=${3:-$1-requirements.lock}
    is_current "$name" "$lock" && return 0
    say "fetching $name (wheels pinned in scripts/$lock)"
    mkdir -p "$NCCL_EP_DEPS"
    scratch=$(mktemp -d "$NCCL_EP_DEPS/$name.XXXXXX")
    "$2" "$scratch" "$here/$lock"
    lock_hash "$lock" >"$scratch/.stamp"
    chmod 755 "$scratch"
    rm -rf "${NCCL_EP_DEPS:?}/$name"
    mv "$scratch" "$NCCL_EP_DEPS/$name"
    scratch=""
}

# nvcc's own profile looks for lib64, and a dynamic link for the name without a version.
unpack_cuda() {
    unpack "$1" "$2"
    ln -sfn lib "$1/nvidia/cu13/lib64"
    ln -sfn libcudart.so.13 "$1/nvidia/cu13/lib/libcudart.so"
}

# For C programs alone: all but the compiler.
unpack_cuda_headers() {
    grep -vE '^nvidia-(cuda-nvcc|nvvm|cuda-cuobjdump)==' "$2" >"$1/lock"
    unpack "$1" "$1/lock"
}

# The wheel is 200 MB of library, which few machines need: the headers have a folder of their own.
unpack_nccl() { unpack_parts "$@" nvidia/nccl/include/ /licenses/; }
unpack_nccl_library() { unpack_parts "$@" nvidia/nccl/lib/ /licenses/; }

# unpack_parts DIR LOCK PART...: only the files of the wheels with one of the parts in their names.
unpack_parts() {
    run_pip download --dest "$1/wheel" -r "$2"
    python3 - "$1" "${@:3}" <<'PYTHON'
import glob, sys, zipfile

target, wanted = sys.argv[1], sys.argv[2:]
for wheel in glob.glob(f"{target}/wheel/*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if any(part in name for part in wanted)]
        archive.extractall(target, names)
PYTHON
    rm -rf "$1/wheel"
}

# Of thousands of modules some hundreds are loaded, which Python compiles then.
unpack() { run_pip install --no-compile --target "$1" -r "$2"; }

# The wheel is for GPUs; without them only its CPU half is used.
unpack_torch() {
    unpack "$1" "$2"
    python3 "$here/cuda_placeholders.py" "$1"
    rm -rf "$1/torch/include" "$1/torch/lib/libtorch_cuda_linalg.so"
}

# The package is to take this project's library, not the one that it brings.
unpack_nccl_ep() {
    unpack "$1" "$2"
    rm -rf "$1"/nccl/ep/lib "$1"/nccl/m2n
}

# Links what read-only sources have already beside what will be fetched; a part that is out of date is replaced.
link_fetched_parts() {
    local part
    [ "$NCCL_EP_DEPS" != "$NCCL_EP_ROOT/.deps" ] && [ -d "$NCCL_EP_ROOT/.deps" ] || return 0
    mkdir -p "$NCCL_EP_DEPS"
    for part in "$NCCL_EP_ROOT"/.deps/*/; do
        part=$(basename "$part")
        [ -e "$NCCL_EP_DEPS/$part" ] || ln -s "$NCCL_EP_ROOT/.deps/$part" "$NCCL_EP_DEPS/$part"
    done
}

# --- What is needed here --------------------------------------------------------------------------

# Says which copy of $1 that was here already is used: once, a stamp remembers the text.
say_once() {
    local stamp="$NCCL_EP_DEPS/.$1-in-use"
    [ "$(cat "$stamp" 2>/dev/null)" = "$2" ] && return 0
    mkdir -p "$NCCL_EP_DEPS"
    say "$2"
    echo "$2" >"$stamp"
}

has_gpu() { [ "$("$here/gpus.py" count)" -gt 0 ]; }

# NCCL's library, for programs on GPUs; one that the machine has is used, whatever brought it.
install_nccl_library() {
    has_gpu || return 0
    case "$("$here/gpus.py" nccl || true)" in
        "" | "$NCCL_EP_DEPS"/*)
            install_wheels nccl-library unpack_nccl_library nccl-requirements.lock ;;
    esac
}

link_fetched_parts
command -v cargo >/dev/null ||
    die "cargo is missing. This line installs Rust; open a new shell then, and try again:" \
        "  curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y"
command -v python3 >/dev/null ||
    die "python3 is missing: install it with pip (Debian: python3 python3-pip)."
if wants --plots; then
    install_wheels plots unpack
    exit 0
fi
install_packages
install_rust_library
if [ -n "$NCCL_EP_REFUSED_CUDA" ]; then say "CUDA_HOME is not used: $NCCL_EP_REFUSED_CUDA"; fi
if wants --wheel; then install_wheels wheel unpack; fi
# The library alone, without kernels, needs nothing of CUDA; programs need its headers.
if wants --library && [ "${NCCL_EP_CUDA:-auto}" = off ]; then exit 0; fi
kernels=yes
if wants --demo && ! has_gpu; then kernels=no; fi
if [ "$CUDA_HOME" = "$NCCL_EP_PINNED_CUDA" ] && [ $kernels = no ]; then
    is_current cuda cuda-requirements.lock ||
        install_wheels cuda-headers unpack_cuda_headers cuda-requirements.lock
elif [ "$CUDA_HOME" = "$NCCL_EP_PINNED_CUDA" ]; then
    install_wheels cuda unpack_cuda
else
    say_once cuda "using the CUDA tool kit at $CUDA_HOME"
fi
! wants --library || exit 0

check_mpi
if [ "$NCCL_INCLUDE" = "$NCCL_EP_PINNED_NCCL" ]; then
    install_wheels nccl unpack_nccl
else
    say_once nccl "using the NCCL headers at $NCCL_INCLUDE"
fi
case "$(command -v cmake || true)" in
    "" | "$NCCL_EP_PINNED_CMAKE"/*) wants --demo || install_wheels cmake unpack ;;
esac
if wants --gpu || wants --demo; then install_nccl_library; fi
if wants --pytest || wants --python; then install_wheels pytest unpack; fi
if wants --docs || wants --python; then install_wheels docs unpack; fi
if wants --python; then
    install_wheels torch unpack_torch
    install_wheels mypy unpack
    install_wheels wheel unpack
    # A client of others, built for x86-64 and Python 3.11 to 3.14. Where it cannot be had, its step is skipped.
    (trap 'rm -rf "$scratch"' EXIT && install_wheels nccl-ep unpack_nccl_ep) || true
fi
