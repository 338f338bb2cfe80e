"""Tests of the guide: its memory formulas, and its page about ep_bench."""

import re
import subprocess
import sys
import unittest

import results
import rows
import run_sweep

sys.path.insert(0, str(rows.ROOT / "python"))
from nccl_ep import memory

__all__ = ["EpBenchPageTest", "MemoryTest"]

# Runs in which something besides the group took memory meanwhile: other runs of the same shape took 6 and 34 MiB.
_OUTLIERS = {(4, 2): 276, (4, 128): 162}


class MemoryTest(unittest.TestCase):
    """The formulas and what ep_bench has measured on GPUs, and the tables that they gave.

    The step simt/memory compares them with what the library allocates, also for high throughput, whose
    results are of an earlier layout, and over several nodes, where no GPU was measured.
    """

    def test_low_latency_takes_what_was_measured(self) -> None:
        compared = 0
        for row in results.where(results.load(), mode="ll", library=rows.OURS, nodes=1):
            measured = row.number("memory_mib")
            ranks = int(row["ranks"])
            if (row["set"] not in ("sweep", "uneven") or measured is None
                    or measured == _OUTLIERS.get((ranks, row.tokens))):
                continue
            shape = memory.Shape("ll", ranks, row.tokens)
            # What has come since: for rank-major rows a weight of each entry in each bank.
            since = ranks * row.tokens * 4 * 32 * 8 / memory.MIB
            self.assertLessEqual(abs(measured + since - _mebibytes(shape)), 4, shape)
            compared += 1
        self.assertGreater(compared, 25)

    def test_the_tables_of_the_documents(self) -> None:
        guide = (rows.ROOT / "docs" / "guide" / "sizing.md").read_text()
        found = re.findall(r"^\| (LL|HT) \| (\d+) \| (\d+|any) \| (\d+) MiB \| (\d+) MiB \|$", guide, re.MULTILINE)
        self.assertEqual(len(found), 7)
        for mode, ranks, tokens, window, together in found:
            for each in ("64", "4096") if tokens == "any" else (tokens,):
                shape = memory.Shape(mode.lower(), int(ranks), int(each))
                self.assertEqual((_window(shape), _mebibytes(shape)), (int(window), int(together)))
        nodes = (rows.ROOT / "docs" / "several-nodes.md").read_text()
        found = re.findall(r"^\| (LL|HT) \| (\d+) x (\d+) \| (\d+) \| (\d+) MiB \| (\d+) MiB \|$", nodes, re.MULTILINE)
        self.assertGreater(len(found), 8)
        for mode, *numbers in found:
            others, each, tokens, window, together = map(int, numbers)
            shape = memory.Shape(mode.lower(), others * each, tokens, nodes=others * (each,))
            self.assertEqual((_window(shape), _mebibytes(shape)), (window, together), shape)

    def test_the_example_of_the_guide(self) -> None:
        shape = memory.Shape("ll", 8, 128)
        received = next(item for item in memory.tensors(shape) if item.name == "received rows")
        self.assertEqual((received.bytes, received.shape), (469762048, "[32, 1024, 7168]"))
        page = (rows.ROOT / "docs" / "guide" / "sizing.md").read_text()
        self.assertIn("469,762,048", page)

    def test_expected_rows_are_those_of_the_floor(self) -> None:
        shape = memory.Shape("ht", 4, 4096)
        per_token = results.Floor(4).ranks_per_token
        self.assertAlmostEqual(memory.expected_rows(shape), 4096 * per_token, delta=1)


def _mebibytes(shape: memory.Shape) -> float:
    return sum(item.pages for item in memory.library(shape)) / memory.MIB


def _window(shape: memory.Shape) -> float:
    return memory.library(shape)[0].pages / memory.MIB


class EpBenchPageTest(unittest.TestCase):
    """The page that explains what ep_bench prints."""

    def test_every_line_is_explained(self) -> None:
        page = (rows.ROOT / "docs" / "guide" / "ep_bench.md").read_text()
        program = run_sweep.default_target() / "c" / "host" / "ep_bench"
        for mode, *more in (("ll",), ("ht", "--dispatch", "fp8", "--cast", "outside")):
            command = ["mpirun", "-np", "2", str(program), "-a", mode, "-e", "16", "-d", "64",
                       "-t", "8", "-i", "2", "--validate", *more]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            # Lines within a block: what comes before a colon or the numbers, without the operation.
            labels = {re.split(r":|\s{2,}", line.strip())[0].split(", ")[-1]
                      for line in done.stdout.splitlines() if line.startswith("  ")}
            self.assertGreater(len(labels), 10)
            self.assertEqual({label for label in labels if label not in page}, set())
