"""Tests of the programs' command lines, and of ep_bench's casts outside the library."""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import run_sweep

_PROGRAM = run_sweep.default_target() / "c" / "host" / "ep_bench"
# Without it a program that ends at once crashes in MPI_Finalize once in some thousand runs on a busy machine: the
# progress thread of Open MPI 4.1 then calls what has been unloaded. Where a rank fails, mpirun need not wait for more.
_ALONE = ("mpirun", "--quiet", "--allow-run-as-root", "--mca", "odls_base_sigkill_timeout", "0", "-np", "1")


def run_alone(program: pathlib.Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs one rank of a program."""
    return subprocess.run([*_ALONE, program, *options], capture_output=True, text=True, check=False)


class CommandLineTest(unittest.TestCase):
    """What is wrong is named, in two lines; the version is that of the library."""

    def test_unknown_routings_and_channels_are_refused(self) -> None:
        for options in (("--routing", "zip"), ("--routing", "zipf:much"), ("--routing", "zipf:"),
                        ("--channels", "many"), ("--channels", "-1")):
            done = run_alone(_PROGRAM, *options)
            self.assertEqual(done.returncode, 1)
            self.assertIn(f"ep_bench: {options[0]}", done.stderr)

    def test_a_cast_that_does_not_happen_is_refused(self) -> None:
        for options, said in ((("--dispatch", "fp8", "--cast", "here"),
                               'expected inside or outside, got "here"'),
                              (("--cast", "outside"), "bf16 is not cast"),
                              (("--dispatch", "nvfp4", "--cast", "outside"),
                               "nvfp4 is always forwarded"),
                              (("--forward", "--dispatch", "fp8", "--cast", "inside"),
                               "with --forward nothing is cast")):
            done = run_alone(_PROGRAM, *options)
            self.assertEqual(done.returncode, 1)
            self.assertIn(f"ep_bench: --cast: {said}", done.stderr)

    def test_a_wrong_word_of_the_command_line_is_named(self) -> None:
        for words, said in ((["-i", "3", "--tokenz"],
                             'unknown option "--tokenz", did you mean --tokens?'),
                            (["--experst=8"], 'unknown option "--experst=8", did you mean --experts?'),
                            (["--ma"], 'unknown option "--ma", did you mean --max-tokens?'),
                            (["--colour", "red"], 'unknown option "--colour"'),
                            (["-pxV"], 'unknown option "-x"'), (["--tokens"], "--tokens: needs a value"),
                            (["-t"], "-t: needs a value"), (["--profile=1"], "--profile: takes no value"),
                            (["more"], 'unexpected argument "more"')):
            done = run_alone(_PROGRAM, *words)
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertEqual(done.stderr, f"ep_bench: {said}\nSee ep_bench --help.\n")
        done = run_alone(_PROGRAM, "--version")
        self.assertRegex(done.stdout, r"^ep_bench (\d+\.\d+\.\d+), libnccl_ep \1\n$")

    def test_ep_bench_2_refuses_what_it_cannot_measure(self) -> None:
        for words in (("--top-k", "9", "--experts", "8"), ("--alignment", "0"), ("--layouts", "ll"), ("--sms", "a"),
                      ("--tokens", "4k")):
            done = run_alone(_PROGRAM.with_name("ep_bench_2"), *words)
            self.assertEqual((done.returncode, done.stdout), (2, ""), words)

    def test_other_programs_do_so_too(self) -> None:
        for program, status in (("ep_test", 1), ("moe_layer", 2)):
            path = _PROGRAM.with_name(program)
            done = run_alone(path, "--token5", "8")
            self.assertEqual((done.returncode, done.stdout), (status, ""))
            self.assertEqual(done.stderr, f'{program}: unknown option "--token5", did you mean --tokens?\n'
                                          f"See {program} --help.\n")
            done = run_alone(path, "--help")
            self.assertIn("--tokens N", done.stdout)


class CastTest(unittest.TestCase):
    """Who casts, in the sweep's table and in its file."""

    def sweep(self, *options: str) -> tuple[dict, str]:
        """The only run of the file, and what was printed."""
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, run_sweep.__file__, "--kind", "host", "--iters", "3",
                       "--algorithm", "ll", "--ranks", "2", "--tokens", "4/0", "--name", "cast",
                       "--out", folder, "--", "--hidden", "288", "--experts", "16", *options]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 0, f"{done.stdout}{done.stderr}")
            content = json.loads((pathlib.Path(folder) / "cast.json").read_text())
        return content["runs"][0], done.stdout

    def test_a_cast_outside_is_timed_apart(self) -> None:
        run, printed = self.sweep("--dispatch", "mxfp8", "--cast", "outside")
        self.assertEqual((run["config"]["cast"], run["config"]["forward"]), ("outside", False))
        entry = run["results"][0]
        self.assertEqual(entry["wrong_rows"], {"dispatch": 0, "combine": 0, "cast": 0})
        for how in ("idle", "queued"):
            times = entry[how]["cast"]
            self.assertEqual(set(times), {"alone", "dispatch", "pair"})
            for figures in times.values():
                self.assertGreater(figures["min_us"], 0)
            self.assertLess(times["alone"]["min_us"], times["pair"]["p99_us"])
        self.assertRegex(printed, r"\n +cast +[\d.]+ +[\d.]+ +[\d.]+  ")

    def test_others_have_no_such_times(self) -> None:
        for options, who in (((), None), (("--dispatch", "fp8", "--cast", "inside"), "inside"),
                             (("--dispatch", "nvfp4"), None)):
            run, printed = self.sweep(*options)
            self.assertEqual(run["config"]["cast"], who)
            self.assertIsNone(run["results"][0]["idle"]["cast"])
            self.assertEqual(set(run["results"][0]["wrong_rows"]), {"dispatch", "combine"})
            self.assertIsNone(re.search(r"\n +cast ", printed))
