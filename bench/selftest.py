#!/usr/bin/env python3
"""Tests of the measuring tools without a GPU: a sweep of each mode on the CPU stand-ins, then
pictures and tables from it. Ends with the line `N passed, N failed`.

Needs the programs (`make programs`). Times of the stand-ins are never shown, so the tests draw a
copy that claims to be measured on GPUs; it stays in a temporary directory.
"""

from __future__ import annotations

import argparse
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
import xml.dom.minidom
from typing import Any

import data
import markdown
import plot
import plot_ht
import plot_ll
import run_sweep
import table
from selftest_command_line import CastTest, CommandLineTest  # noqa
from selftest_guide import *  # noqa: F403
from selftest_scale import NodesTest, ScaleBorderTest, ScaleFilesTest, ScaleFormulaTest  # noqa

_LL_SWEEP = ("--algorithm", "ll", "--ranks", "2", "--tokens", "1..4")
_HT_SWEEP = ("--algorithm", "ht", "--ranks", "4", "--tokens", "64,4096")
_SMALL = ("--", "--hidden", "64", "--experts", "16", "--warmup", "1")


def _sweep(folder: pathlib.Path, *options: str,
           extra: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
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


def _as_if_measured(content: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A copy that may be shown, with `changes` in its configuration."""
    copy = json.loads(json.dumps(content))
    for run in copy["runs"]:
        run["config"].update({"backend": "cuda", "hidden": 7168, "experts": 256, "ranks": 4,
                              **changes})
        run["machine"]["gpu"] = "a <GPU>"
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

    def runs(self, *contents: dict[str, Any]) -> list[data.Run]:
        files = []
        for index, content in enumerate(contents):
            files.append(self.folder / f"case-{index}.json")
            files[-1].write_text(json.dumps(content))
        return data.load_runs(files)


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
        done = subprocess.run([_program(), "--tokens", "1", "--use-cuda-graph"],
                              capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 2)
        self.assertIn("no stream capture here", done.stderr)

    def test_times_of_the_stand_ins_are_not_shown(self) -> None:
        self.assertEqual(self.runs(self.content), [])

    def test_other_configurations_are_not_shown(self) -> None:
        self.assertEqual(self.runs(_as_if_measured(self.content, hidden=4096)), [])

    def test_wrong_data_is_not_shown(self) -> None:
        content = _as_if_measured(self.content)
        content["runs"][0]["results"][1]["wrong_rows"]["combine"] = 1
        shown = self.runs(content)[0].results
        self.assertEqual([entry["tokens"] for entry in shown], [1, 4])

    def test_the_fuller_run_counts_then_the_later(self) -> None:
        old, later, single = (_as_if_measured(self.content) for _ in range(3))
        later["runs"][0]["date"] = "2100-01-01T00:00:00+00:00"
        single["runs"][0]["date"] = "2200-01-01T00:00:00+00:00"
        del single["runs"][0]["results"][1:]
        dates = [run.date for run in self.runs(later, single, old)]
        self.assertEqual(dates, ["2100-01-01T00:00:00+00:00"])

    def test_a_picture_shows_what_was_measured(self) -> None:
        records = data.load_records()
        empty = plot_ll.draw(4, [], records)
        self.assertIn("not measured yet", empty)
        drawn = plot_ll.draw(4, self.runs(_as_if_measured(self.content)), records)
        self.assertNotIn("not measured yet", drawn)
        circles = xml.dom.minidom.parseString(drawn).getElementsByTagName("circle")
        # Three panels of three points, and the legend's.
        self.assertEqual(len(circles), 3 * 3 + 1)

    def test_tables_hold_measured_values_and_verdicts(self) -> None:
        document = "<!-- table: targets -->\nold\n<!-- end -->\n"
        records = data.load_records()
        empty = table.fill(document, [], records)
        self.assertNotIn("old", empty)
        self.assertIn(markdown.NOT_YET, empty)
        content = _as_if_measured(self.content)
        entry = content["runs"][0]["results"][0]
        entry["idle"]["dispatch"]["median_us"] = 11.5
        entry["idle"]["combine"]["median_us"] = 13.2
        filled = table.fill(document, self.runs(content), records)
        self.assertIn("| 4 | 1 | <= 12 | 11.5 | met |", filled)
        self.assertIn("| 4 | 1 | <= 12 | 13.2 | missed by 10.0 % |", filled)
        self.assertEqual(filled, table.fill(filled, self.runs(content), records))

    def test_the_floor_is_that_of_the_records(self) -> None:
        floor = data.floor_of(8, data.load_records())
        self.assertAlmostEqual(floor.ranks_per_token, 5.3, delta=0.05)
        self.assertAlmostEqual(floor.wire_bytes(128) / 1e6, 8.5, delta=0.05)

    def test_the_committed_tables_and_pictures_are_up_to_date(self) -> None:
        runs, records = data.load_runs(data.result_files()), data.load_records()
        for document in (file.read_text() for file in table.DOCUMENTS):
            self.assertEqual(document, table.fill(document, runs, records), "run bench/table.py")
        drawn = plot.draw_all(runs, records)
        committed = {file.name: file.read_text() for file in plot.PLOTS.glob("*.svg")}
        self.assertEqual(committed, drawn, "run bench/plot.py")


class UnevenTest(Sweep):
    """Ranks with different numbers of tokens."""

    options = ("--algorithm", "ll", "--ranks", "2", "--tokens", "8,8/1,0/8")

    def test_every_rank_has_its_tokens_and_right_data(self) -> None:
        entries = self.content["runs"][0]["results"]
        self.assertEqual([entry["tokens_by_rank"] for entry in entries], [[8, 8], [8, 1], [0, 8]])
        self.assertEqual([data.tokens_name(entry) for entry in entries], ["8", "8/1", "0/8"])
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
            done = subprocess.run([_program(), "--tokens", "8", option, value],
                                  capture_output=True, text=True, check=False)
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

    def test_they_do_not_stand_among_even_ones(self) -> None:
        even, uneven = (_as_if_measured(self.content, ranks=2) for _ in range(2))
        del even["runs"][0]["results"][1:]
        runs = self.runs(uneven, even)
        self.assertEqual([len(run.results) for run in runs], [1, 3])
        self.assertEqual([data.find(runs, "ll", 2), data.find(runs, "ll", 2, uneven=True)], runs)
        self.assertEqual(plot.draw_all(runs, data.load_records()),
                         plot.draw_all(runs[:1], data.load_records()))
        uneven["runs"][0]["results"][1]["max_tokens"] = 1024  # a group larger than needed
        self.assertEqual(len(self.runs(uneven, even)), 1)

    def test_the_table_compares_with_the_even_batch(self) -> None:
        document = "<!-- table: uneven 4 -->\nold\n<!-- end -->\n"
        records = data.load_records()
        self.assertIn(markdown.NOT_YET, table.fill(document, [], records))
        content = _as_if_measured(self.content)
        for entry, time in zip(content["runs"][0]["results"], (20, 21, 15)):
            entry["graph"] = {"pair": {"median_us": time}}
            entry["idle"]["dispatch"]["median_us"] = time + 1
        filled = table.fill(document, self.runs(content), records)
        for row in ("| 8 | 20.0 | 1.00 | 21.0 |", "| 8/1 | 21.0 | 1.05 | 22.0 |",
                    "| 0/8 | 15.0 | 0.75 | 16.0 |"):
            self.assertIn(row, filled)
        del content["runs"][0]["results"][0]
        self.assertIn("| 8/1 | 21.0 | - | 22.0 |",
                      table.fill(document, self.runs(content), records))


class HighThroughputTest(Sweep):
    """Routings, numbers of SMs, and pictures and tables of them."""

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
                self.assertAlmostEqual(entry["received_max"],
                                       entry["received_imbalance"] * entry["received_rows"], 3)

    def test_counts_are_those_of_the_routing(self) -> None:
        floor = data.Floor(4, 346, 5, experts=16)
        entry = self.content["runs"][0]["results"][1]
        # Every row sent is received; with 4096 tokens the mean is close to the expectation.
        self.assertEqual(entry["received_rows"] * 2 * 64, entry["bytes"]["dispatch"]["dedup"])
        self.assertAlmostEqual(entry["received_rows"] / 4096 / floor.ranks_per_token, 1, delta=0.01)
        self.assertAlmostEqual(entry["bytes"]["dispatch"]["wire"] / 4096 / 128
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
        done = _sweep(self.folder, *_HT_SWEEP, "--tokens", "16", "--channels", "4,many,12",
                      "--name", "holes")
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

    def test_pictures_and_tables_show_what_was_measured(self) -> None:
        runs = self.runs(_as_if_measured(self.content))
        records = data.load_records()
        self.assertIn(markdown.NOT_YET, plot_ht.draw(4, [], records))
        drawn = plot_ht.draw(4, runs, records)
        self.assertNotIn(markdown.NOT_YET, drawn)
        circles = xml.dom.minidom.parseString(drawn).getElementsByTagName("circle")
        # Two panels of two series of two points, a panel of one of three, the legend's.
        self.assertEqual(len(circles), 2 * 2 * 2 + 3 + 3)
        for name, rows in (("htsweep 4", 2), ("htbudgets 4", 3), ("htzipf 4", 2),
                           ("htpeers 4", 2 + 4)):
            document = f"<!-- table: {name} -->\nold\n<!-- end -->\n"
            empty = table.fill(document, [], records)
            self.assertIn(markdown.NOT_YET, empty)
            filled = table.fill(document, runs, records)
            self.assertNotIn(markdown.NOT_YET, filled)
            self.assertEqual(filled.count("\n| "), 1 + rows, filled)

    def test_a_target_for_any_number_of_sms_takes_the_best(self) -> None:
        content = _as_if_measured(self.content)
        for run, time in zip(content["runs"], (700, 600, 500, 1, 1, 1)):
            run["results"][1]["idle"]["dispatch"]["median_us"] = time
        filled = table.fill("<!-- table: targets -->\n<!-- end -->\n", self.runs(content),
                            data.load_records())
        self.assertIn("24 SMs | 4 | 4096 | <= 560 | 600.0 | missed by 7.1 % |", filled)
        self.assertIn("any number of SMs | 4 | 4096 | <= 520 | 500.0 | met |", filled)


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
        for file in (run_sweep.__file__, data.__file__):
            shutil.copy(file, self.folder)
        (self.folder / "host").mkdir()
        (self.folder / "host" / "ep_bench").symlink_to(_program())
        alone = [sys.executable, str(self.folder / "run_sweep.py"), "--kind", "host", "--prebuilt",
                 str(self.folder), "--iters", "4", "--name", "alone", "--out", str(self.folder)]
        done = subprocess.run([*alone, *_LL_SWEEP, *_SMALL], capture_output=True, text=True,
                              check=False)
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
