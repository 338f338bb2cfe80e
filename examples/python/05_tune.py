"""Tuning: measure on this machine, write a file, and let the library use it.

With real sizes this takes a minute and shows a progress bar. Afterwards start programs with
NCCL_EP_TUNING_FILE=tuning.json; token counts are rounded up to the next one that was measured.

    mpirun -np 4 python3 examples/python/05_tune.py [FILE]
"""

import json
import os
import sys
import tempfile

import nccl_ep
from start import finish, start

EXPERTS_PER_RANK = 8


def main() -> None:
    rank, size, device = start()
    on_gpu = device.type == "cuda"
    hidden, most = (7168, 128) if on_gpu else (256, 4)
    with tempfile.TemporaryDirectory() as folder:
        path = sys.argv[1] if len(sys.argv) > 1 else os.path.join(folder, "tuning.json")
        shape = nccl_ep.MoeShape(num_experts=EXPERTS_PER_RANK * size, hidden=hidden, top_k=8,
                                 max_tokens_per_rank=most)
        found = nccl_ep.tune(path, shape, repetitions=64 if on_gpu else 2)
        if rank == 0:
            with open(path) as file:
                assert json.load(file) == found
            for entry in found["entries"]:
                shape = ("the library's own choice" if "default" in entry else
                         "{blocks} blocks of {threads}, {send_blocks} send".format(**entry))
                print("{operation:12} {tokens:5} tokens: {microseconds:8.1f} us instead of "
                      "{default_microseconds:8.1f}: ".format(**entry) + shape)
    assert all(entry["microseconds"] > 0 for entry in found["entries"])
    finish(rank, f"{len(found['entries'])} entries measured on {size} ranks")


if __name__ == "__main__":
    main()
