"""Tuning: measure on this machine, write a file, and let the library use it.

With real sizes this takes a minute and shows its progress. `python3 -m nccl_ep.tuning` does the same for
a model's sizes. Afterwards start programs with
NCCL_EP_TUNING_FILE=tuning.json; token counts are rounded up to the next one that was measured.

    mpirun -np 4 python3 examples/python/05_tune.py [FILE] [--algorithms ll,ht] [--tokens 4096] [--sms 24]
"""

import argparse
import json
import os
import tempfile

import nccl_ep
from nccl_ep.tuning import show
from start import finish, start

EXPERTS_PER_RANK = 8


def parse_arguments(most: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", help="what to write (a temporary file)")
    parser.add_argument("--algorithms", default="ll", help="ll, ht or both (%(default)s)")
    parser.add_argument("--tokens", type=int, default=most, help="up to so many (%(default)s)")
    parser.add_argument("--sms", type=int, default=0, help="SMs at most (all)")
    return parser.parse_args()


def main() -> None:
    rank, size, device = start()
    on_gpu = device.type == "cuda"
    arguments = parse_arguments(most=128 if on_gpu else 4)
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.file or os.path.join(folder, "tuning.json")
        shape = nccl_ep.MoeShape(num_experts=EXPERTS_PER_RANK * size,
                                 hidden=7168 if on_gpu else 256, top_k=8,
                                 max_tokens_per_rank=arguments.tokens)
        found = nccl_ep.tune(path, shape, algorithms=arguments.algorithms.split(","),
                             num_sms=arguments.sms,
                             repetitions=64 if on_gpu else 2)
        if rank == 0:
            with open(path) as file:
                assert json.load(file) == found
            print(show(found))
    assert all(entry["microseconds"] > 0 for entry in found["entries"])
    finish(rank, f"{len(found['entries'])} entries measured on {size} ranks")


if __name__ == "__main__":
    main()
