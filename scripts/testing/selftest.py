"""Tests of the runner: what counts as a failure, what runs, and that no process is left behind. And the lengths of
functions in Python, of which tests/line_limit.rs has those in C.

The step `runner/self-test` runs them; by hand, `python3 -m unittest testing.selftest` in scripts/.
"""

import ast
import contextlib
import dataclasses
import fnmatch
import io
import os
import pathlib
import threading
import time
import unittest
from unittest import mock

from testing import catalogue, command, counts, pool, report, tiers
from testing.step import ROOT, SETUP, Counts, Finished, Places, Step

# Without what the runner gives its own steps, of which this is one.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("EP_TEST_")}
# Seconds a busy machine may take for what takes milliseconds: a wait that is met ends at once.
PATIENCE = 60


class Readers(unittest.TestCase):
    """Output and exit status become counts; anything unexpected is a failure."""

    def test_closing_line(self):
        read = counts.closing_line
        self.assertEqual(read(Finished(0, "x\n3 passed, 0 failed\n")), Counts(3, 0))
        self.assertEqual(read(Finished(1, "3 passed, 2 failed\n")).failed, 2)
        self.assertEqual(read(Finished(0, "3 passed, 2 failed\n")).failed, 2)
        for bad in (Finished(0, "all is well"), Finished(0, "0 passed, 0 failed\n"),
                    Finished(139, "3 passed, 0 failed\n"), Finished(0, "got 3 passed, 0 failed"),
                    Finished(0, "3 passed, 0 failed\n", timed_out=True)):
            self.assertEqual(read(bad).failed, 1, bad)

    def test_skipped(self):
        read = counts.closing_line
        some = Finished(0, "2 skipped: no graphs\n3 passed, 0 failed\n")
        self.assertEqual(read(some), Counts(3, 0, skipped="2 skipped: no graphs"))
        everything = Finished(77, "2 skipped: no graphs\n0 passed, 0 failed\n")
        self.assertEqual(read(everything), Counts(0, 0, skipped="2 skipped: no graphs"))
        for bad in (Finished(77, "0 passed, 0 failed\n"),
                    Finished(0, "2 skipped: no graphs\n0 passed, 0 failed\n"),
                    Finished(77, "2 skipped: no graphs\n3 passed, 0 failed\n"),
                    Finished(77, "2 skipped: no graphs\n0 passed, 0 failed\n", timed_out=True)):
            self.assertEqual(read(bad).failed, 1, bad)

    def test_cargo(self):
        text = ("test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured\n"
                "test result: {} passed; {} failed; {} ignored; 0 measured\n")
        read = counts.cargo_test
        self.assertEqual(read(Finished(0, text.format("ok. 4", 0, 0))), Counts(7, 0))
        self.assertEqual(read(Finished(101, text.format("FAILED. 4", 2, 0))).failed, 2)
        one_ignored = text.format("ok. 4", 0, 1)
        self.assertEqual(read(Finished(0, one_ignored)).failed, 1)
        self.assertEqual(read(Finished(0, "test a ... ignored, slow\n" + one_ignored)).failed, 1)
        child = "test child_process ... ignored, entry point of child processes\n"
        self.assertEqual(read(Finished(0, child + one_ignored)), Counts(7, 0))
        gpu = "test on_a_gpu ... ignored, needs a GPU\n"
        self.assertEqual(read(Finished(0, gpu + one_ignored)), Counts(7, 0, skipped="1 skipped: no GPU"))
        self.assertEqual(read(Finished(0, gpu + text.format("ok. 4", 0, 2))).failed, 1)
        only_ignored = gpu + "test result: ok. 0 passed; 0 failed; 1 ignored; 0 measured\n"
        self.assertEqual(read(Finished(0, only_ignored)).failed, 1)
        self.assertEqual(read(Finished(0, "")).failed, 1)
        self.assertEqual(read(Finished(101, "error: could not compile")).failed, 1)

    def test_no_warning(self):
        read = counts.no_warning
        self.assertEqual(read(Finished(0, "   Compiling a\n    Finished\n")), Counts(1, 0))
        self.assertFalse(read(Finished(0, "warning: unused variable: `a`\n")).ok)
        self.assertFalse(read(Finished(101, "error: could not compile")).ok)

    def test_says(self):
        read = counts.says(r"^done$", 2)
        self.assertTrue(read(Finished(0, "done\ndone\n")).ok)
        self.assertFalse(read(Finished(0, "done\n")).ok)
        self.assertFalse(read(Finished(1, "done\ndone\n")).ok)


class Commands(unittest.TestCase):
    """A command that hangs is ended with all its children."""

    def test_time_out_ends_grandchildren(self):
        start = time.monotonic()
        finished = command.run(("bash", "-c", "sleep 317 & echo $!; wait"), dict(os.environ), 1)
        self.assertTrue(finished.timed_out)
        self.assertLess(time.monotonic() - start, PATIENCE)
        # On a busy machine a killed process takes a moment to end.
        end = time.monotonic() + PATIENCE
        while self._lives(finished.output.strip()) and time.monotonic() < end:
            time.sleep(0.01)
        self.assertFalse(self._lives(finished.output.strip()))

    @staticmethod
    def _lives(process: str) -> bool:
        try:
            status = pathlib.Path("/proc", process, "status").read_text()
        except OSError:
            return False
        return "State:\tZ" not in status

    def test_missing_program(self):
        self.assertNotEqual(command.run(("/no/such/program",), {}, 1).status, 0)


class Pool(unittest.TestCase):
    """Needs are respected, and a step that could not run counts as failed."""

    @staticmethod
    def _run(*steps, fill=False):
        outcomes = pool.run_steps(steps, ENVIRONMENT, 2, lambda outcome: None, fill)
        return {outcome.step.name: outcome for outcome in outcomes}

    def test_failed_need(self):
        done = self._run(Step("a", ("false",), counts.build),
                         Step("b", ("true",), counts.exit_status, needs=("a",)),
                         Step("c", ("true",), counts.exit_status, needs=("b",)))
        self.assertEqual([done[name].counts.failed for name in "abc"], [1, 0, 0])
        self.assertEqual([done[name].counts.not_run for name in "abc"], ["", "a", "a"])
        self.assertEqual([done[name].counts.ok for name in "abc"], [False] * 3)

    def test_what_fails_by_a_deadline_is_repeated_alone(self):
        beside, others_end = [], threading.Event()

        def late(texts):
            beside.append(others_end.is_set())
            text = texts.pop(0)
            return Counts(int(not text), int(bool(text))), text

        def other():
            others_end.wait(0.2)
            others_end.set()
            return Counts(1, 0), ""

        waited = "rank 2 waited 1002 ms for rank 1"
        done = self._run(*(Step(name, lambda texts=texts: late(texts)) for name, texts in (
            ("flaky", [waited, ""]), ("twice", [waited, waited]), ("wrong", ["3 is not 4", ""]))),
            Step("other", other))
        self.assertEqual({name: each.counts.failed for name, each in done.items()},
                         {"flaky": 0, "twice": 1, "wrong": 1, "other": 0})
        self.assertEqual(done["flaky"].first.output, waited)
        self.assertIsNone(done["wrong"].first)
        self.assertEqual((len(beside), beside[-2:]), (5, [True, True]))
        texts = ["1 is not 2", ""]
        done = self._run(Step("a", lambda: late(texts), short_deadlines=True))
        self.assertEqual(done["a"].first.output, "1 is not 2")
        shell = 'echo $EP_TEST_PATIENCE deadline; [ "$EP_TEST_PATIENCE" = 4 ]'
        done = self._run(Step("a", ("bash", "-c", shell), counts.exit_status))
        self.assertTrue(done["a"].counts.ok, "its deadlines are longer then")

    def test_limits_follow_the_load(self):
        limits = []
        finished = Finished(0, "")
        note = lambda words, environment, limit: limits.append((limit, environment["EP_TEST_DEADLINE"])) or finished
        with (mock.patch.object(command, "run", note),
              mock.patch.object(command.os, "getloadavg", lambda: (3.5 * os.cpu_count(), 0, 0))):
            self._run(Step("a", ("x",), counts.exit_status, timeout=100))
            self._run(Step("b", ("x",), counts.build, timeout=None))
        self.assertEqual(limits, [(350, "420"), (None, "420")])

    def test_order_and_weights(self):
        running, most = [], []
        pair = threading.Barrier(2)

        def step(name):
            running.append(name)
            most.append(len(running))
            if name != "heavy":
                pair.wait(PATIENCE)
            running.remove(name)
            return Counts(1, 0), ""

        names = [(str(i), 1) for i in range(4)] + [("heavy", 2)]
        done = self._run(*(Step(name, lambda name=name: step(name), cores=cores) for name, cores in names))
        self.assertTrue(all(outcome.counts.ok for outcome in done.values()))
        self.assertEqual(max(most), 2)
        self.assertEqual(most[-1], 1)

    def test_idle_cores_get_more_light_steps(self):
        def most_at_once(idle_cores: float, *weights: int, fill: bool = True) -> int:
            running, most = set(), []

            def step(name):
                running.add(name)
                # Until nothing more starts, or all that may have.
                for _ in range(10):
                    most.append(len(running))
                    time.sleep(0.1)
                running.discard(name)
                return Counts(1, 0), ""

            start = time.monotonic()
            with mock.patch.object(command, "idle_seconds", lambda: idle_cores * (time.monotonic() - start)):
                self._run(*(Step(str(i), lambda i=i: step(i), cores=cores)
                            for i, cores in enumerate(weights)), fill=fill)
            return max(most)

        self.assertEqual(most_at_once(0.1, 1, 1, 1), 2)
        self.assertEqual(most_at_once(0.9, 1, 1, 1), 3)
        self.assertEqual(most_at_once(0.9, 1, 1, 2), 2)
        self.assertEqual(most_at_once(0.9, 1, 1, 1, fill=False), 2)

    def test_sleepers_run_one_at_a_time_beside_others(self):
        started = {name: threading.Event() for name in ("heavy", "light", "a", "b")}
        beside = {}

        def step(name, waits_for, never_beside):
            started[name].set()
            met = all(started[other].wait(PATIENCE) for other in waits_for)
            time.sleep(0.1)  # in which a wrong pool would start the other
            beside[name] = started[never_beside].is_set()
            return Counts(int(met), int(not met)), ""

        done = self._run(
            Step("heavy", lambda: step("heavy", ("a",), "light"), cores=2),
            Step("light", lambda: step("light", (), "light"), cores=1),
            Step("a", lambda: step("a", ("heavy",), "b"), cores=0),
            Step("b", lambda: step("b", (), "b"), cores=0))
        self.assertTrue(all(outcome.counts.ok for outcome in done.values()))
        self.assertFalse(beside["heavy"], "light ran beside heavy")
        self.assertFalse(beside["a"], "b ran beside a")

    def test_broken_check(self):
        done = self._run(Step("a", lambda: 1 // 0))
        self.assertEqual(done["a"].counts.failed, 1)

    def test_unknown_need(self):
        with self.assertRaises(ValueError):
            self._run(Step("b", ("true",), counts.build, needs=("a",)))


class Report(unittest.TestCase):
    """What a reader sees, and what is run and built if only some is wanted."""

    PLACES = Places({"NCCL_EP_DEPS": "/deps", "NCCL_EP_RELEASE": "/t/arch/release"}, pathlib.Path("/t"),
                    pathlib.Path("/t/c/host"))

    def _shown(self, *steps):
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            outcomes = pool.run_steps(steps, dict(os.environ), 1, lambda outcome: report.print_outcome(outcome, False))
            report.print_summary(outcomes, 1)
        return shown.getvalue().splitlines()

    def test_what_was_not_run_is_no_failure_and_its_cause_comes_last(self):
        build = Step("build/lib", ("bash", "-c", "seq 99; echo no compiler; false"), counts.build)
        others = [Step(f"test/{i}", ("true",), counts.exit_status, needs=("build/lib",)) for i in range(5)]
        lines = self._shown(build, *others, Step("sound", ("true",), counts.exit_status))
        self.assertEqual(lines[-1], "1 passed, 1 failed")
        cause = lines.index("not run: 5 steps, because build/lib failed:")
        self.assertEqual(lines[-2], "    | no compiler")
        self.assertLess(len(lines) - cause, 25)
        self.assertFalse(any("test/" in line for line in lines[cause:]), lines)

    def test_lines_are_counted_and_flaky_steps_named(self):
        texts = ["the deadline passed", ""]
        step = lambda: (Counts(int(len(texts) == 1), int(len(texts) == 2)), texts.pop(0))
        lines = self._shown(Step("late", step), Step("sound", ("true",), counts.exit_status))
        self.assertRegex(lines[0], r"^\[1/2\] ok .* sound ")
        self.assertRegex(lines[1], r"^\[2/2\] ok .* late .*1 passed, flaky: passed alone$")
        self.assertEqual(lines[-2:], ["flaky: failed by a deadline, then passed alone: late", "2 passed, 0 failed"])

    def _only(self, *words):
        steps = report.select(catalogue.all_steps(self.PLACES), words)
        return {step.name: step for step in catalogue.only_needed(steps, self.PLACES)}

    def _made(self, build):
        start, end = build.command.index("c_tests") + 1, -1
        return [word for word in build.command[start:end] if word.startswith("/t/c") or "=" not in word]

    def test_only_what_is_wanted_is_built(self):
        chosen = self._only("test_ll")
        self.assertIn("test_ll/4", chosen)
        self.assertNotIn("build/sanitizer", chosen)
        self.assertIn("EP_LIBDIR=/t/arch/release", chosen["build/programs"].command)
        self.assertEqual(self._made(chosen["build/programs"]),
                         ["/t/c/fake_nccl/host/libncclep_fake_nccl.so", "/t/c/host/test_ll"])
        self.assertEqual(self._made(chosen["build/simt"]),
                         ["/t/c/simt/lib/libncclep_simt_kernels.so", "/t/c/simt/test_ll"])
        self.assertEqual(self._made(self._only("simt/test_ll")["build/programs"]), ["/t/c/flags"])
        self.assertEqual(self._made(self._only("programs/complete")["build/programs"]), ["host"])
        self.assertEqual(self._made(self._only("sanitize/test_ll")["build/sanitizer"]), ["/t/c-sanitize/host/test_ll"])

    def test_what_is_left_out_of_the_usual_tier(self):
        as_in_ci = {**self.PLACES.environment, "NVCC": "nvcc", "NCCL_EP_ARCHS": "90+ptx"}
        steps = catalogue.all_steps(dataclasses.replace(self.PLACES, environment=as_in_ci))
        names = [step.name for step in steps]
        patterns = (*tiers.ONLY_ALL, *tiers.ONLY_NAMED)
        self.assertEqual([each for each in patterns if not fnmatch.filter(names, each)], [], "they name nothing")
        unnamed = [step.name for step in tiers.unnamed(steps)]
        self.assertEqual([name for name in names if name not in unnamed], fnmatch.filter(names, "engines/*"))
        usual = tiers.usual(steps)
        left = {step.name for step in usual}
        self.assertEqual([(step.name, step.needs) for step in usual if not left.issuperset(step.needs)], [])
        # Each program runs, where kernels run on the CPU, too.
        for folder in ("host", "simt"):
            programs = lambda chosen: {word for step in chosen if not callable(step.command) for word in step.command
                                       if word.startswith(f"/t/c/{folder}/") and "/lib/" not in word}
            self.assertGreater(len(programs(usual)), 15)
            self.assertEqual(programs(usual), programs(steps))
        self.assertNotIn("build/sanitizer", left)

    def test_ranks_start_where_all_is_set_up(self):
        steps = {step.name: step for step in catalogue.all_steps(self.PLACES)}
        needed = lambda step: {name for need in step.needs for name in (need, *needed(steps[need]))}
        starting = [step for step in steps.values() if not callable(step.command) and "mpirun" in step.command]
        self.assertGreater(len(starting), 100)
        self.assertEqual([step.name for step in starting if SETUP not in needed(step)], [])

    def test_steps_stand_behind_those_that_they_need(self):
        before = set()
        for step in catalogue.all_steps(self.PLACES):  # report.select counts on it
            self.assertLessEqual(set(step.needs), before, step.name)
            before.add(step.name)

    def test_builds_have_no_limit(self):
        steps = [*catalogue.all_steps(self.PLACES), *catalogue.gpu_builds(self.PLACES)]
        limits = {step.name: step.timeout for step in steps if step.read is counts.build}
        self.assertIn("build/lib", limits)
        self.assertIn("build/simt", limits)
        self.assertEqual(set(limits.values()), {None}, limits)

    def test_programs_that_lose_ranks_have_short_deadlines(self):
        steps = [step for step in catalogue.all_steps(self.PLACES)
                 if any(name in step.name for name in ("test_death", "test_faults"))]
        self.assertGreater(len(steps), 10)
        self.assertEqual([step.name for step in steps if not step.short_deadlines], [])


def lengths(source: str) -> dict[str, int]:
    """Lines of each function from its first to its last, without the docstring."""
    lines = lambda it: it.end_lineno - it.lineno + 1
    functions = [it for it in ast.walk(ast.parse(source)) if isinstance(it, ast.FunctionDef | ast.AsyncFunctionDef)]
    docstring = lambda it: 0 if ast.get_docstring(it) is None else lines(it.body[0])
    return {f"{it.name}, line {it.lineno}": lines(it) - docstring(it) for it in functions}


class Lengths(unittest.TestCase):
    """Functions of Python have 60 lines at most."""

    def test_no_function_is_over_the_limit(self):
        for folder in ("bench", "c_tests", "docs", "examples", "python", "scripts"):
            found = {(path, name): lines for path in (ROOT / folder).rglob("*.py")
                     for name, lines in lengths(path.read_text()).items()}
            self.assertEqual([(*where, lines) for where, lines in found.items() if lines > 60], [])
            self.assertTrue(found, folder)

    def test_a_function_is_counted_without_its_docstring(self):
        source = ('class A:\n    @b\n    def f(self,\n          x):\n        """Says.\n\n        More.\n        """\n'
                  '        y = x\n\n        return y\n\n    async def g(\n        self,\n    ):\n        """Says."""\n'
                  '        pass\n\n\nB = 1\n')
        self.assertEqual(lengths(source), {"f, line 3": 5, "g, line 13": 4})


if __name__ == "__main__":
    unittest.main()
