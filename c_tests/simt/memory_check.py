#!/usr/bin/env python3
"""Compares the formulas of `nccl_ep.memory` with what the library allocates: on the shim, whose
cudaMemGetInfo knows every byte, for groups on one node and over several.

Usage: memory_check.py TARGET, cargo's target folder with everything built. Each group is made in processes
of its own, as memory of earlier groups would serve it. Ends with "N passed, N failed".
"""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import struct
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

from nccl_ep.memory import Shape, library  # noqa: E402

# Bytes of what has no formula: the group's words, tables and counters, and what ranks tell each other.
MOST_SMALL = 96 << 10
SMALL_THINGS = "group, small things"
SHAPES = (
    # Rows count; slots end between two rows; packets count.
    Shape("ll", 2, 125, experts=16),
    Shape("ll", 3, 500, hidden=264, experts=24),
    Shape("ll", 2, 4096, hidden=8, experts=2048),
    # Where each node has a rank; where it has two; with more nodes; on unequal nodes.
    Shape("ll", 2, 128, nodes=(1, 1)),
    Shape("ll", 4, 512, hidden=1024, nodes=(2, 2)),
    Shape("ll", 3, 700, hidden=264, top_k=32, experts=33, nodes=(1, 1, 1)),
    Shape("ll", 4, 600, hidden=1024, nodes=(3, 1)),
    # Rings of as many slots as they may have, then of those that fit.
    Shape("ht", 2, 64, hidden=8064, experts=16),
    Shape("ht", 2, 20000, hidden=8192, experts=16),
    Shape("ht", 4, 2000, hidden=16384, element_bytes=4, top_k=2),
    # Where each node has a rank: passes of least bytes, two passes, passes of most bytes.
    Shape("ht", 2, 900, nodes=(1, 1)),
    Shape("ht", 2, 2200, nodes=(1, 1)),
    Shape("ht", 3, 9000, experts=48, nodes=(1, 1, 1)),
    # The same where nodes have several; the most chunks; unequal nodes.
    Shape("ht", 4, 5000, hidden=2048, nodes=(2, 2)),
    Shape("ht", 4, 4200, hidden=16384, element_bytes=4, top_k=2, nodes=(2, 2)),
    Shape("ht", 4, 3000, hidden=512, top_k=3, nodes=(3, 1)),
)


def main() -> int:
    target = pathlib.Path(sys.argv[1]).resolve()
    failed = 0
    for shape in SHAPES:
        measured, output = measure(target, shape)
        expected = sum(item.bytes for item in library(shape) if item.name != SMALL_THINGS)
        right = measured is not None and 0 <= measured - expected <= MOST_SMALL
        failed += not right
        print(f"{shape}: {'ok' if right else 'FAILED'}, {expected} bytes by formula, {measured} taken", flush=True)
        if measured is None:
            print(output)
    print(f"{len(SHAPES) - failed} passed, {failed} failed")
    return 1 if failed else 0


def measure(target: pathlib.Path, shape: Shape) -> tuple[int | None, str]:
    """What the rank that needs most has less after it has made a group and a handle, and all output."""
    libraries = pathlib.Path(os.environ.get("NCCL_EP_RELEASE", target / "release"))
    shim = target / "c" / "simt" / "lib" / "libncclep_simt.so"
    environment = {**os.environ, "NCCL_EP_LIBRARY": str(libraries / "libnccl_ep.so"),
                   "NCCL_EP_NCCL_LIBRARY": str(shim), "NCCLEP_HOSTSIM_WITH_GPU": "1"}
    nodes = [str(node) for node, ranks in enumerate(shape.ranks_of_nodes) for _ in range(ranks)]
    words = ["mpirun", "-np", str(shape.ranks), "-x", f"LD_PRELOAD={shim}",
             str(ROOT / "scripts" / "on_nodes.sh"), ",".join(nodes), sys.executable, __file__,
             "--rank", json.dumps(vars(shape))]
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, check=False)
    taken = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("taken: ")]
    complete = done.returncode == 0 and len(taken) == shape.ranks
    return max(taken) if complete else None, done.stdout


def run_rank(shape: Shape) -> None:
    """One rank of a measurement: prints what the group and a handle with all tokens have taken."""
    import nccl_ep

    cuda = ctypes.CDLL(None)
    ids = ctypes.c_void_p()
    entries = shape.tokens * shape.top_k
    numbers = [entry % shape.experts for entry in range(entries)]
    assert cuda.cudaMalloc(ctypes.byref(ids), ctypes.c_size_t(8 * entries)) == 0
    assert cuda.cudaMemcpy(ids, struct.pack(f"<{entries}q", *numbers), ctypes.c_size_t(8 * entries), 1) == 0
    tensor = nccl_ep.ncclNDTensor_t()
    tensor.version, tensor.ndim, tensor.datatype, tensor.tag = (
        1, 2, nccl_ep.ncclDataTypeEnum.ncclInt64, nccl_ep.ncclEpTensorTag_t.NCCL_EP_TENSOR_TAG_TOPK_IDX)
    tensor.sizes = (ctypes.c_uint * 2)(shape.tokens, shape.top_k)
    tensor.strides = (ctypes.c_uint * 2)(shape.top_k, 1)
    tensor.data = ids.value
    config = nccl_ep.ncclEpGroupConfig_t()
    config.version, config.num_experts = 1, shape.experts
    config.algorithm = (nccl_ep.NCCL_EP_ALGO_LOW_LATENCY if shape.algorithm == "ll" else
                        nccl_ep.NCCL_EP_ALGO_HIGH_THROUGHPUT)
    config.max_tokens_per_rank, config.token_size_bytes = shape.tokens, shape.row_bytes

    nccl = nccl_ep.NCCLLibrary()
    comm = nccl_ep.get_nccl_comm_from_group(None, nccl)
    before = free_bytes(cuda)
    group = nccl.ncclEpCreateGroup(comm, config)
    handle = nccl.ncclEpCreateHandle(group, tensor)
    taken = before - free_bytes(cuda)
    nccl.ncclEpHandleDestroy(handle)
    nccl.ncclEpGroupDestroy(group)
    os.write(1, f"taken: {taken}\n".encode())


def free_bytes(cuda: ctypes.CDLL) -> int:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert cuda.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)) == 0
    return free.value


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        fields = json.loads(sys.argv[2])
        run_rank(Shape(**{**fields, "nodes": tuple(fields["nodes"])}))
    else:
        sys.exit(main())
