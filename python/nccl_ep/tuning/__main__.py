"""`python -m nccl_ep.tuning`: measures launch shapes on this machine and writes a tuning file.

    mpirun -np 4 python3 -m nccl_ep.tuning tuning.json --experts 256 --hidden 7168 --top-k 8 --tokens 128

Every rank takes the GPU of its number on the machine. Ranks meet as those of `EpGroup` do.
`python -m nccl_ep.tuning merge OUT FILE...` makes one file of several.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

from nccl_ep.nccl_wrapper import NCCLLibrary
from nccl_ep.rendezvous import launched_local_rank, launched_rank
from nccl_ep.runtime import uses_stand_ins
from nccl_ep.tuning import MoeShape, merging, tune
from nccl_ep.tuning.candidates import VARIABLE


def main(words: list[str] | None = None) -> None:
    """The command."""
    words = sys.argv[1:] if words is None else words
    if words[:1] == ["merge"]:
        return merging.main(words[1:])
    arguments = _parser().parse_args(words)
    shape = MoeShape(arguments.experts, arguments.hidden, arguments.top_k, arguments.tokens,
                     getattr(torch, arguments.dtype))
    rank, _ = launched_rank()
    NCCLLibrary()
    if not uses_stand_ins():
        torch.cuda.set_device(launched_local_rank() % torch.cuda.device_count())
    found = tune(arguments.file, shape, algorithms=arguments.algorithms.split(","),
                 num_sms=arguments.sms, repetitions=arguments.repetitions,
                 progress=not arguments.quiet)
    if rank == 0 and not arguments.quiet:
        for entry in found["entries"]:
            print(_line(entry))
        print(f"Start programs with {VARIABLE}={arguments.file}", flush=True)


def _line(entry: dict[str, Any]) -> str:
    choice = ("the library's own choice" if "default" in entry else
              "{blocks} blocks of {threads}, {send_blocks} send".format(**entry))
    return ("{operation:12} {tokens:5} tokens: {microseconds:8.1f} us instead of "
            "{default_microseconds:8.1f}: ".format(**entry) + choice)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nccl_ep.tuning", description="Measures launch shapes on this machine's GPUs "
        "and writes a file for NCCL_EP_TUNING_FILE. Start it by mpirun, srun or torchrun.")
    parser.add_argument("file", help="what to write")
    for name, text in (("experts", "over all ranks"), ("hidden", "elements of a row"),
                       ("top-k", "experts of a token"), ("tokens", "of a rank, at most")):
        parser.add_argument(f"--{name}", type=int, required=True, help=text)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16",
                        help="of rows (%(default)s)")
    parser.add_argument("--algorithms", default="ll", help="ll, ht or ll,ht (%(default)s)")
    parser.add_argument("--sms", type=int, default=0, help="SMs at most (all)")
    parser.add_argument("--repetitions", type=int, default=64, help="per shape (%(default)s)")
    parser.add_argument("--quiet", action="store_true", help="no progress, no table")
    return parser


if __name__ == "__main__":
    main()
