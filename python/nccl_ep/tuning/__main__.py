"""`python -m nccl_ep.tuning`: measures variants and launch shapes on this machine and writes a tuning file.

    mpirun -np 4 python3 -m nccl_ep.tuning tuning.json --experts 256 --hidden 7168 --top-k 8 --tokens 128

Every rank takes the GPU of its number on the machine. Ranks meet as those of `EpGroup` do.
`python -m nccl_ep.tuning merge OUT FILE...` makes one file of several, `show FILE [--plot PICTURE]` draws one.
"""

from __future__ import annotations

import argparse
import itertools
import sys

import torch

from nccl_ep.nccl_wrapper import NCCLLibrary
from nccl_ep.rendezvous import launched_local_rank, launched_rank
from nccl_ep.runtime import uses_stand_ins
from nccl_ep.tuning import MoeShape, Rows, merge, show, tune
from nccl_ep.tuning.files import VARIABLE, measured, read


def main(words: list[str] | None = None) -> None:
    """The command."""
    words = sys.argv[1:] if words is None else words
    if words[:1] in (["merge"], ["show"]):
        try:
            return {"merge": _merge, "show": _show}[words[0]](words[1:])
        except (OSError, ValueError) as error:
            raise SystemExit(f"nccl_ep.tuning {words[0]}: {error}") from None
    arguments = _parser().parse_args(words)
    shape = MoeShape(arguments.experts, arguments.hidden, arguments.top_k, arguments.tokens,
                     getattr(torch, arguments.dtype))
    casts = [None if cast == "none" else cast for cast in arguments.casts.split(",")]
    rows = [Rows(*each) for each in itertools.product(casts, arguments.layouts.split(","), arguments.memory.split(","))]
    rank, _ = launched_rank()
    NCCLLibrary()
    if not uses_stand_ins():
        torch.cuda.set_device(launched_local_rank() % torch.cuda.device_count())
    found = tune(arguments.file, shape, algorithms=arguments.algorithms.split(","), rows=rows, exact=arguments.exact,
                 num_sms=arguments.sms, repetitions=arguments.repetitions, progress=not arguments.quiet)
    if rank == 0 and not arguments.quiet:
        print(show(found))
        print(f"Start programs with {VARIABLE}={arguments.file}", flush=True)


def _merge(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m nccl_ep.tuning merge", description=merge.__doc__)
    parser.add_argument("target", help="what to write")
    parser.add_argument("files", nargs="+", help="what nccl_ep.tuning has written")
    arguments = parser.parse_args(words)
    for part in merge(arguments.target, arguments.files)["files"]:
        print(f"{part['gpu']}, {part['ranks']} ranks: {len(measured(part))} entries")


def _show(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m nccl_ep.tuning show", description="What a tuning file says.")
    parser.add_argument("file", help="what nccl_ep.tuning has written")
    parser.add_argument("--plot", metavar="FILE", help="also a picture, by matplotlib; of a merged file its last part")
    arguments = parser.parse_args(words)
    for part in read(arguments.file):
        print(f"{part['gpu']}, {part['ranks']} ranks\n\n{show(part, arguments.plot)}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nccl_ep.tuning", description="Measures variants and launch shapes on this machine's GPUs "
        "and writes a file for NCCL_EP_TUNING_FILE. Start it by mpirun, srun or torchrun.")
    parser.add_argument("file", help="what to write")
    for name, text in (("experts", "over all ranks"), ("hidden", "elements of a row"),
                       ("top-k", "experts of a token"), ("tokens", "of a rank, at most")):
        parser.add_argument(f"--{name}", type=int, required=True, help=text)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16",
                        help="of rows (%(default)s)")
    for name, default, text in (("algorithms", "ll", "ll, ht or ll,ht"), ("casts", "none", "of none, fp8, mxfp8, .."),
                                ("layouts", "expert", "of expert, rank, view, in ll"),
                                ("memory", "plain", "of plain, symmetric, in ht")):
        parser.add_argument(f"--{name}", default=default, help=f"{text} (%(default)s)")
    parser.add_argument("--exact", action="store_true", help="also ll.exact, which changes the last bits of sums")
    parser.add_argument("--sms", type=int, default=0, help="SMs at most (all)")
    parser.add_argument("--repetitions", type=int, default=64, help="per candidate (%(default)s)")
    parser.add_argument("--quiet", action="store_true", help="no progress, no table")
    return parser


if __name__ == "__main__":
    main()
