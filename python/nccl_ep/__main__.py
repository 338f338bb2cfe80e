"""`python -m nccl_ep doctor`."""

from __future__ import annotations

import argparse

from nccl_ep import doctor


def main() -> int:
    """Runs the command that the arguments name; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m nccl_ep")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what this process finds: versions, libraries, GPUs, "
                                       "environment, and what is wrong with it")
    parser.parse_args()
    return doctor.run()


if __name__ == "__main__":
    raise SystemExit(main())
