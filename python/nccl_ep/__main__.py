"""`python -m nccl_ep doctor` and `python -m nccl_ep demo`."""

from __future__ import annotations

import argparse

from nccl_ep import demo, doctor


def main() -> int:
    """Runs the command that the arguments name; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m nccl_ep")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what this process finds: versions, libraries, GPUs, "
                                       "environment, and what is wrong with it")
    shown = commands.add_parser("demo", help="starts ranks, on GPUs if there are any, and draws who "
                                             "sends what to whom")
    shown.add_argument("--ranks", type=int, help="how many (4, or as many as there are GPUs if fewer)")
    shown.add_argument("--stand-ins", action="store_true", help="on the CPU in any case")
    arguments = parser.parse_args()
    if arguments.command == "doctor":
        return doctor.run()
    return demo.run(arguments.ranks, arguments.stand_ins)


if __name__ == "__main__":
    raise SystemExit(main())
