#!/usr/bin/env python3
"""Tests of the measuring tools without a GPU: a sweep of each mode on the CPU stand-ins, rows of results.csv
from it, then tables and pictures. Ends with the line `N passed, N failed`.

Needs the programs (`make programs`). Times of the stand-ins never become rows, so the tests convert a copy
that claims to be measured on GPUs.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
from typing import Any

import plot
import results
import rows
import run_sweep
import table
from selftest_command_line import CastTest, CommandLineTest, run_alone  # noqa
from selftest_guide import *  # noqa: F403

_LL_SWEEP = ("--algorithm", "ll", "--ranks", "2", "--tokens", "1..4")
_HT_SWEEP = ("--algorithm", "ht", "--ranks", "4", "--tokens", "64,1024")
_SMALL = ("--", "--hidden", "64", "--experts", "16", "--warmup", "1")


def _sweep(folder: pathlib.Path, *options: str, extra: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Runs the sweep with `options`; `extra` go to the program."""
    command = [sys.executable, run_sweep.__file__, "--kind", "host", "--iters", "4", "--name",
               "trial", "--out", str(folder), *options, *_SMALL, *extra]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _results(folder: pathlib.Path, *options: str) -> dict[str, Any]:
    """The content of the file that a sweep wrote; the sweep must succeed."""
    done = _sweep(folder, *options)
    if done.returncode != 0:
        raise RuntimeError(f"the sweep failed:\n{done.stdout}{done.stderr}")
    return json.loads((folder / "trial.json").read_text())


def _program() -> pathlib.Path:
    return run_sweep.default_target() / "c" / "host" / "ep_bench"


def _as_if_measured(content: dict[str, Any]) -> dict[str, Any]:
    """A copy that becomes rows."""
    copy = json.loads(json.dumps(content))
    for run in copy["runs"]:
        run["config"]["backend"] = "cuda"
        run["machine"].update({"gpu": "NVIDIA H200", "nccl": 22803})
    return copy


class Sweep(unittest.TestCase):
    """One sweep serves all tests of a class."""

    options: tuple[str, ...]
    folder: pathlib.Path
    content: dict[str, Any]

    @classmethod
    def setUpClass(cls) -> None:
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        cls.folder = pathlib.Path(temporary.name)
        cls.content = _results(cls.folder, *cls.options)

    def rows(self, content: dict[str, Any] | None = None) -> list[dict[str, str]]:
        """The rows of a content, by default of the sweep as if it had been measured."""
        return list(rows.rows_of(content or _as_if_measured(self.content), "trial"))


class LowLatencyTest(Sweep):
    """The program, the choice of runs, and pictures and tables of low latency."""

    options = _LL_SWEEP

    def test_a_sweep_has_every_number_of_tokens_and_right_data(self) -> None:
        entries = self.content["runs"][0]["results"]
        self.assertEqual([entry["tokens"] for entry in entries], [1, 2, 4])
        for entry in entries:
            self.assertEqual(entry["wrong_rows"], {"dispatch": 0, "combine": 0})
            self.assertIsNone(entry["graph"])
            for how, names in (("idle", ("dispatch", "combine", "pair")),
                               ("queued", ("dispatch", "combine", "pair")),
                               ("host_call", ("dispatch", "combine", "complete"))):
                for name in names:
                    figures = entry[how][name]
                    self.assertGreater(figures["min_us"], 0)
                    self.assertLessEqual(figures["min_us"], figures["median_us"])
                    self.assertLessEqual(figures["median_us"], figures["p90_us"])
                    self.assertLessEqual(figures["p90_us"], figures["p99_us"])

    def test_a_program_that_fails_is_reported(self) -> None:
        done = _sweep(self.folder, *_LL_SWEEP, "--name", "failing", "--tokens", "0")
        self.assertEqual(done.returncode, 1)
        self.assertIn("0 runs passed, 1 failed", done.stdout)
        self.assertFalse((self.folder / "failing.json").exists())

    def test_capture_is_refused_with_status_2(self) -> None:
        done = run_alone(_program(), "--tokens", "1", "--use-cuda-graph")
        self.assertEqual(done.returncode, 2)
        self.assertIn("no stream capture here", done.stderr)

    def test_times_of_the_stand_ins_become_no_rows(self) -> None:
        self.assertEqual(self.rows(self.content), [])

    def test_wrong_data_becomes_no_row(self) -> None:
        content = _as_if_measured(self.content)
        content["runs"][0]["results"][1]["wrong_rows"]["combine"] = 1
        self.assertEqual([row["tokens"] for row in self.rows(content)], ["1", "4"])

    def test_a_row_has_what_was_measured(self) -> None:
        content = _as_if_measured(self.content)
        run, entry = content["runs"][0], content["runs"][0]["results"][2]
        row = self.rows(content)[2]
        described = {"gpus": "2", "card": "H200", "nccl": "2.28.3", "library": rows.OURS,
                     "set": "trial", "mode": "ll", "tokens": "4", "hidden": "64", "experts": "16",
                     "rows": "bfloat16", "routing": "scores", "sms": "", "options": "",
                     "date": run["date"][:10], "command": run["command"]}
        self.assertEqual(described, {column: row[column] for column in described})
        for column, path in (("idle_dispatch", "idle.dispatch.median_us"),
                             ("queued_pair", "queued.pair.median_us"),
                             ("waited_combine", "reference.combine.median_us"),
                             ("waited_pair", "reference.total.median_us"),
                             ("host_combine", "host_call.combine.median_us"),
                             ("host_combine_p99", "host_call.combine.p99_us")):
            self.assertAlmostEqual(float(row[column]), rows.value_at(entry, path), 3, column)
        self.assertEqual((row["graph_pair"], row["kernel_pair"]), ("", ""))

    def test_a_row_says_what_was_unusual(self) -> None:
        content = _as_if_measured(self.content)
        run = content["runs"][0]
        run["config"].update({"dispatch": "fp8", "cast": "outside", "masked": 0, "channels": 99, "nodes": 2})
        entry = run["results"][0]
        entry["max_tokens"] = 8
        entry["idle"]["cast"] = {"dispatch": {"median_us": 1.5}, "pair": {"median_us": 2.25}}
        alone = {"idle": {"dispatch": {"median_us": 0.5}}}
        entry["network"] = {"nccl_alone": alone}
        row, nccl = self.rows(content)[:2]
        self.assertEqual(row["options"], "cast before; 0 masked; at most 8 tokens")
        self.assertEqual((row["rows"], row["sms"], row["nodes"]), ("fp8", "64", "2"))
        self.assertEqual((row["idle_dispatch"], row["idle_pair"]), ("1.5", "2.25"))
        self.assertEqual((nccl["library"], nccl["idle_dispatch"]), ("NCCL alone", "0.5"))

    def test_appended_rows_are_read_again(self) -> None:
        file = self.folder / "results.csv"
        source = self.folder / "measured.json"
        source.write_text(json.dumps(_as_if_measured(self.content)))
        shutil.copy(rows.FILE, file)
        words = ["rows.py", str(source), "--set", "trial", "--append"]
        with unittest.mock.patch.object(rows, "FILE", file), \
                unittest.mock.patch.object(sys, "argv", words):
            self.assertEqual(rows.main(), 0)
        before, after = results.load(), results.load(file)
        self.assertEqual(after[:len(before)], before)
        self.assertEqual([row.fields for row in after[len(before):]], self.rows())


class ShownTest(unittest.TestCase):
    """The committed rows, tables and pictures."""

    def test_they_are_up_to_date(self) -> None:
        all_rows = results.load()
        for document in table.DOCUMENTS:
            content = document.read_text()
            self.assertEqual(content, table.fill(content, all_rows), "run bench/table.py")
        for name, digest in plot.digests(plot.pictures(all_rows)).items():
            picture = (plot.PLOTS / f"{name}.svg").read_text()
            self.assertTrue(digest in picture, f"{name}.svg is out of date, run make plots")

    def test_every_table_stands_in_a_document(self) -> None:
        written = "".join(document.read_text() for document in table.DOCUMENTS)
        self.assertEqual({name for name in table.TABLES if f"table: {name} -->" not in written}, set())

    def test_another_result_changes_table_and_picture(self) -> None:
        all_rows = results.load()
        row = results.where(all_rows, name="sweep", mode="ll", ranks=4, tokens=128)[0]
        other = dataclasses.replace(row, fields={**row.fields, "graph_pair": "43.21"})
        changed = [other if it is row else it for it in all_rows]
        document = "<!-- table: peers-ll -->\nold\n<!-- end -->\n"
        dispatch, combine, pair = (f"{time:.1f}" for time in row.times("graph"))
        for shown, chosen in ((pair, all_rows), ("43.2", changed)):
            self.assertIn(f"| graph | {dispatch} | {combine} | {shown} |", table.fill(document, chosen))
        before, after = (plot.digests(plot.pictures(each)) for each in (all_rows, changed))
        self.assertEqual({name for name in before if before[name] != after[name]}, {"low-latency"})

    def test_every_row_has_figures_of_known_columns(self) -> None:
        for row in results.load():
            self.assertEqual(tuple(row.fields), rows.COLUMNS)
            self.assertTrue(row.ways(), row.fields)

    def test_the_floor_is_that_of_the_wire(self) -> None:
        floor = results.Floor(8)
        self.assertAlmostEqual(floor.ranks_per_token, 5.3, delta=0.05)
        self.assertAlmostEqual(floor.wire_bytes(128) / 1e6, 8.5, delta=0.05)
        self.assertAlmostEqual(floor.us(128), 29.6, delta=0.05)


class UnevenTest(Sweep):
    """Ranks with different numbers of tokens."""

    options = ("--algorithm", "ll", "--ranks", "2", "--tokens", "8,8/1,0/8")

    def test_every_rank_has_its_tokens_and_right_data(self) -> None:
        entries = self.content["runs"][0]["results"]
        self.assertEqual([entry["tokens_by_rank"] for entry in entries], [[8, 8], [8, 1], [0, 8]])
        self.assertEqual([rows.tokens_name(entry) for entry in entries], ["8", "8/1", "0/8"])
        for entry in entries:
            self.assertEqual((entry["tokens"], entry["max_tokens"]), (8, 8))
            self.assertEqual(entry["wrong_rows"], {"dispatch": 0, "combine": 0})
        # Together the second and third have all tokens of the first, and one twice.
        both, fewer, rest = (entry["bytes"]["dispatch"]["pair"] for entry in entries)
        self.assertGreater(both, fewer)
        self.assertGreater(fewer + rest, both)

    def test_numbers_that_do_not_fit_are_refused(self) -> None:
        for option, value in (("--tokens", "8,1"), ("--tokens", "0"), ("--sweep", "4,8/1"),
                              ("--sweep", "4,0"), ("--max-tokens", "4")):
            done = run_alone(_program(), "--tokens", "8", option, value)
            self.assertEqual(done.returncode, 1)
            self.assertIn(f"ep_bench: {option}: expected", done.stderr)

    def test_the_usual_matrix_has_them_in_low_latency_only(self) -> None:
        arguments = argparse.Namespace(tokens=None, routing=[], channels=[])
        sweeps = {(mode, ranks): [job.tokens for job in run_sweep.jobs_of(mode, ranks, arguments)]
                  for mode in ("ll", "ht") for ranks in (1, 2, 4)}
        few = ("64", "32", "16", "8", "4", "2", "1", "0")
        two = ",".join(["128", *(f"128/{tokens}" for tokens in few)])
        four = ",".join([two, *(f"{tokens}/128" for tokens in few)])
        self.assertEqual(sweeps["ll", 1], ["1..1024"])
        self.assertEqual(sweeps["ll", 2], ["1..1024", two])
        self.assertEqual(sweeps["ll", 4], ["1..1024", four])
        self.assertNotIn("/", "".join(sweeps["ht", 4]))
        arguments.tokens = "uneven"
        self.assertEqual([job.tokens for job in run_sweep.jobs_of("ll", 4, arguments)], [four])


class HighThroughputTest(Sweep):
    """Routings and numbers of SMs."""

    options = (*_HT_SWEEP, "--routing", "uniform,zipf:1.5", "--channels", "4,12,all")

    def test_every_routing_runs_with_every_number_of_sms(self) -> None:
        kinds = [(run["config"]["routing"], run["config"]["zipf_exponent"],
                  run["config"]["channels"]) for run in self.content["runs"]]
        # The stand-ins' device has 64 SMs.
        self.assertEqual(kinds, [("scores", None, 4), ("scores", None, 12), ("scores", None, 32),
                                 ("zipf", 1.5, 4), ("zipf", 1.5, 12), ("zipf", 1.5, 32)])
        for run in self.content["runs"]:
            for entry in run["results"]:
                self.assertEqual(entry["wrong_rows"], {"dispatch": 0, "combine": 0})
                self.assertIsNone(entry["blocks"])
                self.assertLessEqual(entry["received_max"], 4 * entry["tokens"])
                self.assertAlmostEqual(entry["received_max"], entry["received_imbalance"] * entry["received_rows"], 3)

    def test_counts_are_those_of_the_routing(self) -> None:
        floor = results.Floor(4, experts=16)
        entry = self.content["runs"][0]["results"][1]
        # Every row sent is received; with 1024 tokens the mean is close to the expectation.
        self.assertEqual(entry["received_rows"] * 2 * 64, entry["bytes"]["dispatch"]["dedup"])
        self.assertAlmostEqual(entry["received_rows"] / 1024 / floor.ranks_per_token, 1, delta=0.01)
        self.assertAlmostEqual(entry["bytes"]["dispatch"]["wire"] / 1024 / 128
                               / (floor.ranks_per_token * 3 / 4), 1, delta=0.01)

    def test_zipf_prefers_the_same_experts_everywhere_and_is_repeatable(self) -> None:
        done = _sweep(self.folder, *_HT_SWEEP, "--tokens", "1024", "--name", "skewed",
                      "--routing", "zipf:2,zipf:0,zipf:2", extra=("--top-k", "1"))
        self.assertEqual(done.returncode, 0, done.stdout)
        runs = json.loads((self.folder / "skewed.json").read_text())["runs"]
        skewed, flat, again = (run["results"][0] for run in runs)
        # The most popular of 16 experts gets this share of all tokens, its rank slightly more.
        share = 1 / sum(rank ** -2 for rank in range(1, 17))
        self.assertGreater(skewed["received_imbalance"], 0.95 * 4 * share)
        self.assertLess(skewed["received_imbalance"], 4)
        self.assertLess(flat["received_imbalance"], 1.1)
        for key in ("received_rows", "received_max", "wire_rows_in_max", "bytes"):
            self.assertEqual(skewed[key], again[key])

    def test_a_run_that_fails_does_not_cost_the_others(self) -> None:
        done = _sweep(self.folder, *_HT_SWEEP, "--tokens", "16", "--channels", "4,many,12", "--name", "holes")
        self.assertEqual(done.returncode, 1)
        self.assertIn("2 runs passed, 1 failed", done.stdout)
        content = json.loads((self.folder / "holes.json").read_text())
        self.assertEqual([run["config"]["channels"] for run in content["runs"]], [4, 12])

    def test_the_usual_matrix_has_all_tokens_budgets_and_routings(self) -> None:
        arguments = argparse.Namespace(tokens=None, routing=[], channels=[])
        jobs = run_sweep.jobs_of("ht", 4, arguments)
        self.assertEqual({job.channels for job in jobs}, {"4", "8", "12", "16", "all"})
        self.assertEqual({job.routing for job in jobs}, {"uniform", "zipf"})
        self.assertEqual({job.tokens for job in jobs}, {"512..16384", "4096"})
        self.assertEqual(len(jobs), len(set(jobs)))

    def test_rows_name_routing_and_sms(self) -> None:
        self.assertEqual([(row["routing"], row["sms"], row["tokens"]) for row in self.rows()],
                         [(routing, sms, tokens) for routing in ("scores", "zipf:1.5")
                          for sms in ("8", "24", "64") for tokens in ("64", "1024")])


class MachineTest(unittest.TestCase):
    """Which GPUs and which NCCL the sweep uses, and that it runs without the repository."""

    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)

    def test_hidden_gpus_do_not_count(self) -> None:
        listing = self.folder / "nvidia-smi"
        listing.write_text("#!/bin/sh\nfor i in 0 1 2 3 4 5 6 7; do echo \"GPU $i: x\"; done\n")
        listing.chmod(0o755)
        path = f"{self.folder}:{os.environ['PATH']}"
        for chosen, expected in (("0,1", {"2"}), ("0,1,2,3", {"2", "4"})):
            environment = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": chosen}
            done = subprocess.run([sys.executable, run_sweep.__file__, "--kind", "host",
                                   "--mpirun", "true", "--out", str(self.folder)],
                                  env=environment, capture_output=True, text=True, check=False)
            self.assertEqual(set(re.findall(r"(\d) ranks", done.stdout)), expected, done.stderr)

    def test_the_loader_gets_an_nccl_that_it_does_not_know(self) -> None:
        (self.folder / "home" / "lib").mkdir(parents=True)
        (self.folder / "home" / "lib" / "libnccl.so.2").touch()
        arguments = argparse.Namespace(library=None, prebuilt=self.folder, timeout=1)
        settings = {"NCCL_HOME": str(self.folder / "home"), "LD_LIBRARY_PATH": "/mine"}
        with unittest.mock.patch.dict(os.environ, settings):
            nccl = run_sweep.gpus.find_nccl(os.environ)
            path = run_sweep._environment(arguments)["LD_LIBRARY_PATH"]
        expected = [str(self.folder / "lib"), "/mine"]
        if nccl != run_sweep.gpus.SYSTEM:
            expected.append(str(self.folder / "home" / "lib"))
        self.assertEqual(path.split(":"), expected)

    def test_the_sweep_alone_runs_programs_made_elsewhere(self) -> None:
        for file in (run_sweep.__file__, rows.__file__):
            shutil.copy(file, self.folder)
        (self.folder / "host").mkdir()
        (self.folder / "host" / "ep_bench").symlink_to(_program())
        alone = [sys.executable, str(self.folder / "run_sweep.py"), "--kind", "host", "--prebuilt",
                 str(self.folder), "--iters", "4", "--name", "alone", "--out", str(self.folder)]
        done = subprocess.run([*alone, *_LL_SWEEP, *_SMALL], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, f"{done.stdout}{done.stderr}")
        self.assertTrue((self.folder / "alone.json").exists())


def main() -> int:
    result = unittest.TextTestRunner(verbosity=2).run(
        unittest.defaultTestLoader.loadTestsFromModule(sys.modules[__name__]))
    failed = len(result.failures) + len(result.errors)
    print(f"{max(result.testsRun - failed, 0)} passed, {failed} failed")
    return 1 if failed or result.testsRun == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
