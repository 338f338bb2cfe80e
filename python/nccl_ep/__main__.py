"""`python -m nccl_ep doctor`, `demo` and `bench`."""

from __future__ import annotations

import argparse
import signal

from nccl_ep import bench, demo, doctor


def main() -> int:
    """Runs the command that the arguments name; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m nccl_ep")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what this process finds: versions, libraries, GPUs, "
                                       "environment, and what is wrong with it")
    shown = commands.add_parser("demo", help="starts ranks, on GPUs if there are any, and draws who "
                                             "sends what to whom")
    _add_ranks(shown, "how many (4, or as many as there are GPUs if fewer)")
    _add_bench(commands.add_parser("bench", help="times dispatch and combine on the GPUs of this machine, or shows "
                                                 "files of such runs"))
    arguments = parser.parse_args()
    if arguments.command == "doctor":
        return doctor.run()
    if arguments.command == "demo":
        return demo.run(arguments.ranks, arguments.stand_ins)
    if arguments.plot and not arguments.show:
        parser.error("--plot: expected --show FILE..., whose picture it is")
    if arguments.show:
        return bench.show(arguments.show, arguments.plot)
    if arguments.top_k > arguments.experts:
        parser.error(f"--top-k: expected at most {arguments.experts} experts")
    modes = tuple(mode for mode in bench.MODES if mode in arguments.modes.split(","))
    settings = bench.Settings(modes, arguments.tokens, arguments.experts, arguments.hidden, arguments.top_k,
                              arguments.dtype, arguments.sms, arguments.repetitions)
    return bench.run(settings, arguments.ranks, arguments.stand_ins, arguments.json)


def _add_ranks(parser: argparse.ArgumentParser, ranks: str) -> None:
    parser.add_argument("--ranks", type=int, help=ranks)
    parser.add_argument("--stand-ins", action="store_true", help="on the CPU in any case")


def numbers(text: str) -> tuple[int, ...]:
    """Those between commas."""
    return tuple(map(int, text.split(",")))


def _add_bench(parser: argparse.ArgumentParser) -> None:
    _add_ranks(parser, "how many (as many as there are GPUs)")
    parser.add_argument("--modes", choices=("ll", "ht", "ll,ht"), default="ll,ht", metavar="MODES",
                        help="ll, ht or ll,ht (%(default)s)")
    parser.add_argument("--tokens", type=numbers, default="1,8,32,128", help="of each rank (%(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16",
                        help="of rows (%(default)s)")
    for name, number, text in (("experts", 256, "over all ranks"), ("hidden", 7168, "elements of a row"),
                               ("top-k", 8, "experts of a token"), ("repetitions", 64, "of each operation"),
                               ("sms", 0, "SMs at most; 0: the library's choice")):
        parser.add_argument(f"--{name}", type=int, default=number, help=f"{text} (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write what was measured")
    parser.add_argument("--show", metavar="FILE", nargs="+", help="measure nothing: the table of these files")
    parser.add_argument("--plot", metavar="FILE", help="with --show: also a picture, by matplotlib")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # of `| head`
    raise SystemExit(main())
