"""Tests of the scale model, which selftest.py runs with the others."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest
import xml.dom.minidom
from typing import Any

import data
import plot_scale
import scale_model as model
from scale_model import Group

_CHOICES = tuple(itertools.product(model.TOKENS, model.OPERATIONS, (False, True)))
_TOKENS = (1, 2, 3, 7, 16, 31, 32, 100, 128, 129, 500, 1024, 4096, 5000, 16384)


def _run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, model.__file__, *options], capture_output=True,
                          text=True, check=False)


class ScaleFormulaTest(unittest.TestCase):
    """Limits in which the answer is known from elsewhere."""

    def test_one_node_without_overheads_takes_the_floor(self) -> None:
        records, wires = data.load_records(), model.constants().without_overheads()
        for gpus, tokens in itertools.product((1, 2, 4, 8), _TOKENS):
            floor = data.floor_of(gpus, records).floor_us(tokens)
            self.assertAlmostEqual(model.floor_us(Group(1, gpus), tokens, wires), floor)
            for mode, operation, compacted in _CHOICES:
                time = model.time_us(Group(1, gpus), mode, operation, tokens, wires, compacted)
                self.assertAlmostEqual(time, floor)

    def test_rows_are_those_of_counting_all_choices_of_experts(self) -> None:
        for nodes, gpus, top_k, experts in ((4, 2, 3, 8), (2, 3, 4, 12), (3, 1, 2, 9),
                                            (2, 2, 4, 4)):
            group = Group(nodes, gpus, top_k, experts)
            choices = list(itertools.combinations(range(experts), top_k))
            elsewhere = inside = 0
            for chosen in choices:
                ranks = {expert * group.ranks // experts for expert in chosen}
                # A token of rank 0, and the GPUs of each node besides the one of its rail.
                elsewhere += len({rank // gpus for rank in ranks} - {0})
                inside += len([rank for rank in ranks if rank % gpus != 0])
            self.assertAlmostEqual(group.rail_rows(compacted=True), elsewhere / len(choices))
            self.assertAlmostEqual(group.nvlink_rows, inside / len(choices))
            self.assertEqual(group.rail_rows(compacted=False), nodes - 1)

    def test_experts_are_a_whole_number_for_each_rank(self) -> None:
        self.assertEqual([Group(nodes).experts for nodes in (1, 3, 32, 64)], [256, 264, 256, 512])

    def test_more_tokens_never_take_less_time(self) -> None:
        for case, nodes, gpus in itertools.product(model.CASES, (1, *model.NODES), (1, 4, 8)):
            machine = model.constants(case)
            for mode, operation, compacted in _CHOICES:
                group = Group(nodes, gpus)
                times = [model.time_us(group, mode, operation, tokens, machine, compacted)
                         for tokens in _TOKENS]
                # One more pass may cost less than what it hides.
                for one, two in itertools.pairwise(range(len(_TOKENS))):
                    if mode == "ll" or len({group.passes(_TOKENS[i]) for i in (one, two)}) == 1:
                        self.assertLessEqual(times[one], times[two])

    def test_no_prediction_is_below_the_floor_and_cases_are_in_order(self) -> None:
        for nodes, tokens in itertools.product((1, *model.NODES), _TOKENS):
            for choice in _CHOICES:
                best, value, worst = (
                    model.time_us(Group(nodes), choice[0], choice[1], tokens,
                                  model.constants(case), choice[2])
                    for case in ("best", "value", "worst"))
                self.assertLessEqual(model.floor_us(Group(nodes), tokens, model.constants("best")),
                                     best)
                self.assertTrue(best < value < worst)

    def test_the_slower_of_rail_and_nvlink_decides(self) -> None:
        fast = model.constants(rail_gbps=1e6)
        parts = model.predict(Group(2), "ht", "dispatch", 4096, fast)
        inside = Group(2).wire_us(4096 * Group(2).nvlink_rows, fast.ht_nvlink_gbps)
        self.assertGreater(parts["NVLink"], inside - parts["rail"])


class ScaleBorderTest(unittest.TestCase):
    """Bytes and borders that the design of groups over several nodes was decided by."""

    def test_bytes_of_whole_and_compacted_rows(self) -> None:
        for nodes, reach, of_rank, more, inside in (
                (2, .997, .408, .004, 5.71), (4, .904, .227, .11, 6.36), (8, .662, .120, .51, 6.72),
                (16, .408, .062, 1.45, 6.90)):
            group = Group(nodes)
            self.assertAlmostEqual(group.reach(nodes), reach, delta=.0006)
            self.assertAlmostEqual(group.reach(group.ranks), of_rank, delta=.0006)
            ratio = group.rail_rows(compacted=False) / group.rail_rows(compacted=True)
            self.assertAlmostEqual(ratio - 1, more, delta=.006)
            self.assertAlmostEqual(group.nvlink_rows, inside, delta=.006)

    def test_whole_rows_end_between_four_and_eight_nodes(self) -> None:
        machine = model.constants()
        for tokens in (32, 64, 128, 1024):
            self.assertEqual(model.whole_rows_until("ll", tokens, machine), 4)
        self.assertGreaterEqual(model.whole_rows_until("ll", 8, machine), 8)
        # Far beyond all overheads only bytes count.
        self.assertAlmostEqual(model.excess(Group(8), "ht", 10 ** 7, machine), .51, delta=.01)

    def test_below_some_tokens_latency_decides(self) -> None:
        tokens = [round(model.tokens_of_latency(nodes, model.constants())) for nodes in (2, 4, 8)]
        self.assertEqual(tokens, [94, 31, 13])

    def test_passes_are_those_of_the_library(self) -> None:
        self.assertEqual([Group(nodes).passes(4096) for nodes in (1, 2, 4, 8)], [8, 8, 11, 16])
        self.assertEqual([Group(2, 1).passes(tokens) for tokens in (128, 4096, 16384)], [1, 2, 8])
        self.assertEqual([Group(2).passes(tokens) for tokens in (1, 292, 293, 2341)], [1, 1, 2, 9])

    def test_a_combine_has_one_exchange_and_one_kernel_more(self) -> None:
        machine = model.constants()
        dispatch, combine = (model.predict(Group(4), "ll", operation, 128, machine)
                             for operation in model.OPERATIONS)
        self.assertEqual(combine["latency"] - dispatch["latency"], machine.next_latency_us)
        self.assertEqual(combine["peers"], 2 * dispatch["peers"])
        self.assertEqual(combine["kernels"] - dispatch["kernels"], machine.kernel_us)
        self.assertEqual(combine["NVLink"], dispatch["NVLink"])
        # 64 bytes of ids go with a row, and 32 of weights.
        self.assertAlmostEqual(dispatch["rail"] / combine["rail"], 14400 / 14368)

    def test_predictions_are_near_the_estimates_made_by_hand(self) -> None:
        machine = model.constants()
        # A combine has a second exchange, of weights.
        for nodes, dispatch, combine in ((2, 112, 148), (4, 193, 228), (8, 350, 383)):
            for operation, expected in (("dispatch", dispatch), ("combine", combine)):
                time = model.time_us(Group(nodes), "ll", operation, 128, machine)
                self.assertAlmostEqual(time / expected, 1, delta=.03)
        slower = model.constants(rail_gbps=46)
        for nodes, expected in ((2, 1430), (4, 3660), (8, 6100)):
            time = model.time_us(Group(nodes), "ht", "dispatch", 4096, slower)
            self.assertAlmostEqual(time / expected, 1, delta=.06)


class ScaleFilesTest(unittest.TestCase):
    """Constants, committed measurements, --check and pictures."""

    def test_one_node_is_near_what_was_measured(self) -> None:
        runs = [run for run in data.load_runs(data.result_files())
                if run.label == data.OURS and model.checked(run)]
        self.assertGreaterEqual(len(runs), 2)
        for run in runs:
            for operation in model.OPERATIONS:
                tokens = model.TOKENS[run.algorithm]
                measured = run.value(tokens, f"idle.{operation}.median_us")
                assert measured is not None
                time = model.time_us(Group(1, run.ranks), run.algorithm, operation, tokens,
                                     model.constants())
                self.assertAlmostEqual(measured / time, 1, delta=.1)

    def test_every_constant_says_where_it_is_from(self) -> None:
        content = model.load()
        names = {field.name for field in dataclasses.fields(model.Constants)}
        for entries in (content["node"], *content["fabrics"].values()):
            for name, entry in entries.items():
                self.assertIn(name, names)
                self.assertIn(entry["kind"], ("measured here", "published", "assumed"))
                self.assertTrue(entry["origin"] and entry["date"] and entry["what"])
        for record in content["published"]:
            self.assertTrue(record["source"] and record["points"])
            self.assertIn(record["rows"], ("BF16", "FP8", "not given"))

    def test_a_run_over_several_nodes_stands_beside_its_prediction(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "trial.json"
            file.write_text(json.dumps(_measured_on(ranks=4, tokens=128, dispatch=700)))
            group, machine = Group(2, 2), model.constants(fabric="loopback")
            time = model.time_us(group, "ll", "dispatch", 128, machine)
            done = _run("--check", str(file), "--nodes", "2", "--fabric", "loopback")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn(f"| ll | 2 | 2 | 128 | {time:.1f} | 700.0 | {700 / time:.2f} |",
                          done.stdout)
            unequal = _run("--check", str(file), "--nodes", "3")
            self.assertEqual(unequal.returncode, 1)
            self.assertIn("4 ranks are not 3 equal nodes", unequal.stderr)

    def test_the_program_prints_parts_and_refuses_unknown_constants(self) -> None:
        done = _run("--mode", "ht", "--nodes", "2", "--set", "rail_gbps=46")
        self.assertIn("Prediction, not a measurement", done.stdout)
        self.assertEqual(done.stdout.count("\n| 2 |"), 4)
        self.assertEqual(_run("--set", "rail=46").returncode, 2)

    def test_pictures_say_that_they_predict(self) -> None:
        for name, drawn in plot_scale.draw_all().items():
            document = xml.dom.minidom.parseString(drawn)
            texts = [element.firstChild.data for element in document.getElementsByTagName("text")]
            self.assertTrue(texts[0].startswith("PREDICTION of a model"), name)
            self.assertEqual(len([text for text in texts if text.startswith("prediction: ")]), 2)

    def test_labels_keep_their_distance_and_move_little(self) -> None:
        self.assertEqual(plot_scale.spread([10, 50, 90], 10), [10, 50, 90])
        self.assertEqual(plot_scale.spread([50, 50, 52, 100], 10), [40 + 2 / 3, 50 + 2 / 3,
                                                                    60 + 2 / 3, 100])
        for frame_marks in itertools.combinations_with_replacement((0, 4, 9, 30), 4):
            places = plot_scale.spread(list(frame_marks), 10)
            for above, below in itertools.pairwise(places):
                self.assertGreaterEqual(below - above, 10 - 1e-9)


class NodesTest(unittest.TestCase):
    """A sweep whose ranks are on two nodes."""

    @classmethod
    def setUpClass(cls) -> None:
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.file = pathlib.Path(folder.name) / "trial.json"
        sweep = pathlib.Path(__file__).with_name("run_sweep.py")
        cls.done = subprocess.run(
            [sys.executable, str(sweep), "--kind", "host", "--algorithm", "ll", "--nodes", "2",
             "--ranks", "4", "--tokens", "2,6", "--iters", "4", "--name", "trial", "--out",
             folder.name, "--", "--hidden", "64", "--experts", "16", "--warmup", "1"],
            capture_output=True, text=True, check=False)

    def test_results_have_the_network_and_nccl_alone(self) -> None:
        self.assertEqual(self.done.returncode, 0, f"{self.done.stdout}{self.done.stderr}")
        self.assertEqual(self.done.stdout.count("alone, with the bytes between nodes"), 2)
        run = json.loads(self.file.read_text())["runs"][0]
        self.assertEqual(run["config"]["nodes"], 2)
        for entry in run["results"]:
            tokens, network = entry["tokens"], entry["network"]
            # Bytes; top-8.
            rows, ids, weights, head = 128 * tokens, 64 * tokens, 32 * tokens, 32
            # Every token goes to the other node, which returns a sum for it.
            self.assertEqual(network["dispatch"]["sent"], rows + ids + head)
            self.assertEqual(network["combine"]["sent"], rows + weights + 2 * head)
            self.assertLessEqual(network["dispatch"]["once"], rows)
            self.assertGreater(network["dispatch"]["once"], 0)
            for operation in model.OPERATIONS:
                for way in ("idle", "queued", "host_call"):
                    figures = network["nccl_alone"][way][operation]
                    self.assertGreater(figures["median_us"], 0)

    def test_pages_of_one_node_do_not_show_them(self) -> None:
        content = _measured_on(ranks=4, tokens=128, dispatch=700)
        content["runs"][0]["config"]["nodes"] = 2
        self.file.with_name("shown.json").write_text(json.dumps(content))
        files = [self.file.with_name("shown.json")]
        self.assertEqual(data.load_runs(files), [])
        self.assertEqual([run.nodes for run in data.load_runs(files, several_nodes=True)], [2])


def _measured_on(ranks: int, tokens: int, dispatch: float) -> dict[str, Any]:
    """The content of a result file with one entry, as run_sweep.py writes it."""
    entry = {"tokens": tokens, "max_tokens": tokens, "wrong_rows": None,
             "idle": {"dispatch": {"median_us": dispatch}, "combine": {"median_us": 2 * dispatch}}}
    config = {"algorithm": "ll", "ranks": ranks, "hidden": 7168, "top_k": 8, "experts": 256,
              "masked": 10, "use_fp8": False, "backend": "cuda"}
    run = {"date": "2026-11-22T00:00:00+00:00", "command": "ep_bench", "config": config,
           "machine": {"gpu": "a GPU", "multiprocessors": 132}, "results": [entry]}
    return {"label": data.OURS, "runs": [run]}
