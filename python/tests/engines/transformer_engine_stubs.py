"""Builds a library of those functions that libtransformer_engine.so needs and the stand-ins lack, to be preloaded, and
empty ones by the names of the libraries that it needs: LIBRARY STAND_INS FOLDER. CUDA_HOME has the headers."""

import ctypes
import os
import pathlib
import subprocess
import sys

_DEVICE = """#include <cuda_runtime_api.h>
#undef cudaGetDeviceProperties
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* to, int device) {
    *to = (struct cudaDeviceProp){.major = 9, .multiProcessorCount = 132};
    return 0;
}
static int device(int* to) {  // cuCtxGetDevice, all that it calls of the driver
    *to = 0;
    return 0;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned int version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult* status) {
    *function = (void*)device;
    return 0;
}
int ncclGetVersion(int* to) {  // it refuses the stand-ins' 2.28.9
    *to = 23007;
    return 0;
}
"""


def main(library: str, stand_ins: str, folder: pathlib.Path) -> None:
    known = ctypes.CDLL(stand_ins)
    names = {line.split()[-1].partition("@")[0] for line in _output("nm", "-D", "--undefined-only", library)}
    wanted = sorted(name for name in names if name.startswith(("cu", "__cuda", "nvrtc"))
                    and name + "(" not in _DEVICE and not hasattr(known, name))
    (folder / "device.c").write_text(_DEVICE)
    (folder / "stubs.c").write_text("".join(f"void* {name}(void) {{ return 0; }}\n" for name in wanted))
    subprocess.run(("cc", "-w", "-fPIC", "-shared", f"-I{os.environ['CUDA_HOME']}/include", "-o", "stubs.so",
                    "device.c", "stubs.c"), cwd=folder, check=True)
    for line in _output("readelf", "-dW", library):
        name = line.rpartition("[")[2].rstrip("]")
        if "(NEEDED)" in line and name.startswith(("libcu", "libnv")):
            subprocess.run(("cc", "-shared", "-o", folder / name, "-xc", "/dev/null"), check=True)


def _output(*words: str) -> list[str]:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]))
