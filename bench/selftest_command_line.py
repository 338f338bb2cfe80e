"""Tests of ep_bench's command line."""

from __future__ import annotations

import subprocess
import unittest

import run_sweep

_PROGRAM = run_sweep.default_target() / "c" / "host" / "ep_bench"


class CommandLineTest(unittest.TestCase):
    """What is wrong is named; the version is that of the library."""

    def test_unknown_routings_and_channels_are_refused(self) -> None:
        for options in (("--routing", "zip"), ("--routing", "zipf:much"), ("--routing", "zipf:"),
                        ("--channels", "many"), ("--channels", "-1")):
            done = subprocess.run([_PROGRAM, *options], capture_output=True, text=True,
                                  check=False)
            self.assertEqual(done.returncode, 1)
            self.assertIn(f"ep_bench: {options[0]}", done.stderr)

    def test_a_wrong_word_of_the_command_line_is_named(self) -> None:
        for words, said in ((["-i", "3", "--tokenz"], 'unknown option "--tokenz"'),
                            (["-pxV"], 'unknown option "-x"'), (["--tokens"], "--tokens: needs a value"),
                            (["-t"], "-t: needs a value"), (["--profile=1"], "--profile: takes no value"),
                            (["more"], 'unexpected argument "more"')):
            done = subprocess.run([_PROGRAM, *words], capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 1)
            self.assertEqual(done.stderr.splitlines()[0], f"ep_bench: {said}")
        done = subprocess.run([_PROGRAM, "--version"], capture_output=True, text=True, check=True)
        self.assertRegex(done.stdout, r"^ep_bench (\d+\.\d+\.\d+), libnccl_ep \1\n$")
