"""Checks of the built library and the header as a linker and a compiler see them.

Each function is one step and returns its counts and a text to print on failure.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable

from testing import command, counts
from testing.step import BUILT, ROOT, Counts, Places, Step

FIRST_RELEASE = ("CreateGroup", "GroupDestroy", "TensorCreate", "TensorDestroy", "CreateHandle",
                 "HandleDestroy", "Dispatch", "Combine", "Complete", "HandleGetNumRecvTokens")
OWN_ADDITIONS = ("GetVersion", "GetLastError", "GetAsyncError", "GroupCountRows", "GroupTimeWaits",
                 "GroupTimeCombineWaits", "HandleOpen", "HandleOpenBounded", "HandleUpdate", "HandleWaitNumRecvTokens",
                 "SetChoice", "SetSelector", "MemAlloc", "MemFree", "MemRegister", "MemDeregister", "MemInfo",
                 "PoolUse", "PoolAlloc", "PoolFree")

# Present on every glibc system: no CUDA, no NCCL, no C++ library.
_ALLOWED_NEEDED = re.compile(r"(libc|libm|libdl|libpthread|librt)\.so\.\d|libgcc_s\.so\.1"
                             r"|ld-linux-(x86-64\.so\.2|aarch64\.so\.1)")

# Of the later interface (abi/second).
_SECOND = ("GetVersion", "TensorAlloc", "TensorDestroy", "CreateGroup", "GroupDestroy", "HandleMemSize", "InitHandle",
           "UpdateHandle", "CreateHandle", "HandleDestroy", "Dispatch", "Combine", "Complete", "MaskQuery",
           "MaskUpdate", "MaskClean", "GetAsyncError", "ErrorClear")

_STANDARDS = ("c99", "c11", "c++11", "c++14", "c++17", "c++20")

# Includes the header twice; declares a completion as the README's staged example does.
_HEADER_USER = """
#include <nccl_ep.h>
#include <nccl_ep.h>
#if NCCL_EP_VERSION_CODE < NCCL_EP_VERSION(0, 1, 0) || !NCCL_EP_HAS_GET_VERSION
#error "the macros of the version"
#endif
int main(void) {
    ncclEpCompleteConfig_t config;
    int version;
    (void)config;
    return ncclEpGetVersion(&version);
}
"""

_SECOND_HEADER_USER = """
#include <nccl_ep.h>
#include <nccl_ep.h>
#if NCCL_EP_VERSION_CODE != 200
#error "the macros of the version"
#endif
int main(void) {
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
    ncclEpTensor_t tensor = NCCL_EP_TENSOR_INIT;
    ncclEpDispatchConfig_t options = NCCL_EP_DISPATCH_CONFIG_INIT;
    ncclEpGroup_t group = NULL;
    if (!NCCL_EP_HAS_FIELD(&options, ncclEpDispatchConfig_t, quant_recipe)) return (int)tensor.size;
    return ncclEpCreateGroup(&group, NULL, &config);
}
"""


def steps(places: Places) -> list[Step]:
    """The steps of this file."""
    shared = places.libraries / "libnccl_ep.so"
    needs = BUILT

    def checked(name: str, check: Callable[[], tuple[Counts, str]]) -> Step:
        return Step(f"abi/{name}", check, needs=needs)

    second = places.libraries / "libnccl_ep_2.so"
    own = [f"ncclEp{name}" for name in FIRST_RELEASE + OWN_ADDITIONS]
    result = [
        checked("exports", lambda: _exports(shared, own)),
        checked("soname", lambda: _dynamic(shared, "SONAME", ["libnccl_ep.so"])),
        checked("soname-hostsim", lambda: _dynamic(places.libraries / "libncclep_hostsim.so",
                                                   "SONAME", ["libncclep_hostsim.so"])),
        checked("needed", lambda: _needed(shared)),
        checked("exports-second", lambda: _exports(second, [f"ncclEp{name}" for name in _SECOND])),
        checked("soname-second", lambda: _dynamic(second, "SONAME", ["libnccl_ep.so.0"])),
        checked("needed-second", lambda: _needed(second)),
        checked("banner-second", lambda: _banner(second)),
        checked("native-static-libs", lambda: _native_static_libs(places)),
    ]
    for standard in _STANDARDS:
        result.append(Step(f"abi/header-{standard}", lambda standard=standard: _header(places, standard)))
        result.append(Step(f"abi/header-second-{standard}",
                           lambda standard=standard: _header(places, standard, "nccl_ep_2", _SECOND_HEADER_USER)))
    return result


def _output(*words: str) -> str:
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout


def _compare(found: Iterable[str], expected: Iterable[str]) -> tuple[Counts, str]:
    found, expected = sorted(found), sorted(expected)
    if found == expected:
        return Counts(1, 0), ""
    return Counts(0, 1, "differs"), f"found:    {found}\nexpected: {expected}"


def _exports(library, expected: Iterable[str]) -> tuple[Counts, str]:
    """A library exports its interface alone: nothing of the core, nor of another interface."""
    lines = _output("nm", "-D", "--defined-only", str(library)).splitlines()
    return _compare((line.split()[-1] for line in lines), expected)


def _dynamic_entries(library, tag: str) -> list[str]:
    text = _output("readelf", "--dynamic", "--wide", str(library))
    return re.findall(rf"\({tag}\)[^\[]*\[([^\]]*)\]", text)


def _dynamic(library, tag: str, expected: list[str]) -> tuple[Counts, str]:
    return _compare(_dynamic_entries(library, tag), expected)


def _needed(library) -> tuple[Counts, str]:
    needed = _dynamic_entries(library, "NEEDED")
    foreign = [name for name in needed if not _ALLOWED_NEEDED.fullmatch(name)]
    if needed and not foreign:
        return Counts(1, 0), ""
    return Counts(0, 1, "needs a library that not every system has"), f"needed: {needed}"


def _banner(library) -> tuple[Counts, str]:
    """Clients look for the version in the file."""
    banners = re.findall(rb"\0NCCL EP version ([^\0]*)\0", library.read_bytes())
    return _compare([re.sub(rb"\+cuda.*", b"", it).decode() for it in banners], ["0.2.0"])


def _native_static_libs(places: Places) -> tuple[Counts, str]:
    """The list for static links in packaging/ equals the one that rustc prints for a library of the core,
    on which alone it depends: an ABI has no native library of its own."""
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "library.rs"
        source.write_text("pub use nccl_ep_core as core;\n")
        words = ("rustc", "--edition=2024", "--crate-type=staticlib", "--print=native-static-libs",
                 f"-Ldependency={places.libraries / 'deps'}",
                 f"--extern=nccl_ep_core={places.libraries / 'libnccl_ep_core.rlib'}",
                 "-o", str(source.with_suffix(".a")), str(source))
        finished = command.run(words, places.environment, 60)
    printed = re.findall(r"native-static-libs: (.*)", finished.output)
    if not printed:
        return Counts(0, 1, "rustc printed no list"), finished.output
    packaged = (ROOT / "packaging" / "native-static-libs").read_text().strip()
    return _compare([printed[-1].strip()], [packaged])


def _header(places: Places, standard: str, folder: str = "", user: str = _HEADER_USER) -> tuple[Counts, str]:
    language, compiler = ("c++", "g++") if "++" in standard else ("c", "gcc")
    words = [compiler, "-x", language, f"-std={standard}", "-Wall", "-Wextra", "-Wpedantic",
             "-Werror", "-fsyntax-only", f"-I{ROOT / 'include' / folder}",
             "-isystem", f"{places.environment['CUDA_HOME']}/include",
             "-isystem", places.environment["NCCL_INCLUDE"], "-"]
    done = subprocess.run(words, input=user, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return counts.exit_status(command.Finished(done.returncode, done.stdout)), done.stdout
