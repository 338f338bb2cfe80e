#!/usr/bin/env python3
"""Tests of the measuring tools on a machine without a GPU: one sweep on the CPU stand-ins, then
pictures and tables from it. Ends with the line `N passed, N failed`.

The programs must have been built (`make programs`). The times of the sweep mean nothing, so the
copy that is drawn says that it was measured on GPUs; it never leaves a temporary directory.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest
import xml.dom.minidom
from typing import Any

import data
import plot
import run_sweep
import table

_SWEEP = ("--kind", "host", "--ranks", "2", "--tokens", "1..4", "--iters", "4", "--name", "trial")
_SMALL = ("--", "--hidden", "512", "--experts", "16", "--warmup", "1")


def _sweep(folder: pathlib.Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, run_sweep.__file__, *_SWEEP, "--out", str(folder), *options, *_SMALL]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _as_if_measured(content: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The same times, as a run that may be shown; `changes` go into its configuration."""
    copy = json.loads(json.dumps(content))
    for run in copy["runs"]:
        run["config"].update({"backend": "cuda", "hidden": 7168, "experts": 256, "ranks": 4,
                              **changes})
        run["machine"]["gpu"] = "a <GPU>"
    return copy


class SweepTest(unittest.TestCase):
    """One sweep serves all tests."""

    folder: pathlib.Path
    content: dict[str, Any]

    @classmethod
    def setUpClass(cls) -> None:
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        cls.folder = pathlib.Path(temporary.name)
        done = _sweep(cls.folder)
        if done.returncode != 0:
            raise RuntimeError(f"the sweep failed:\n{done.stdout}{done.stderr}")
        cls.content = json.loads((cls.folder / "trial.json").read_text())

    def runs(self, *contents: dict[str, Any]) -> list[data.Run]:
        files = []
        for index, content in enumerate(contents):
            files.append(self.folder / f"case-{index}.json")
            files[-1].write_text(json.dumps(content))
        return data.load_runs(files)

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
        done = _sweep(self.folder, "--name", "failing", "--algorithm", "ht", "--tokens", "0")
        self.assertEqual(done.returncode, 1)
        self.assertIn("0 runs passed, 1 failed", done.stdout)
        self.assertFalse((self.folder / "failing.json").exists())

    def test_capture_is_refused_with_status_2(self) -> None:
        program = run_sweep.default_target() / "c" / "host" / "ep_bench"
        done = subprocess.run([program, "--tokens", "1", "--use-cuda-graph"], capture_output=True,
                              text=True, check=False)
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
        empty = plot.draw(4, [], records)
        self.assertIn("not measured yet", empty)
        drawn = plot.draw(4, self.runs(_as_if_measured(self.content)), records)
        self.assertNotIn("not measured yet", drawn)
        document = xml.dom.minidom.parseString(drawn)
        circles = document.getElementsByTagName("circle")
        # Three panels of three points, and the legend's.
        self.assertEqual(len(circles), 3 * 3 + 1)

    def test_tables_hold_measured_values_and_verdicts(self) -> None:
        document = "<!-- table: targets -->\nold\n<!-- end -->\n"
        records = data.load_records()
        empty = table.fill(document, [], records)
        self.assertNotIn("old", empty)
        self.assertIn(table.NOT_YET, empty)
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
        document = (data.ROOT / "docs" / "performance.md").read_text()
        self.assertEqual(document, table.fill(document, runs, records), "run bench/table.py")
        drawn = plot.draw_all(runs, records)
        committed = {file.name: file.read_text() for file in plot.PLOTS.glob("*.svg")}
        self.assertEqual(committed, drawn, "run bench/plot.py")


def main() -> int:
    result = unittest.TextTestRunner(verbosity=2).run(
        unittest.defaultTestLoader.loadTestsFromModule(sys.modules[__name__]))
    failed = len(result.failures) + len(result.errors)
    print(f"{max(result.testsRun - failed, 0)} passed, {failed} failed")
    return 1 if failed or result.testsRun == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
