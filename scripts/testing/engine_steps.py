"""The tests of engines' own files (python/tests/engines): over the CPU stand-ins as steps of `make test-engines`, which
fetches the files, and on GPUs under the same names where there are any; and of NVIDIA's `nccl.ep` package.
"""

from __future__ import annotations

import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence

from testing import command, counts, python_steps
from testing.gpu_machine import Machine
from testing.step import ROOT, Counts, Finished, Places, Step, fetched

_RANKS = (2, 4)
_OVER_DEEP_EP = ("sglang", "vllm", "megatron_core")
# An older release of one of them, by its folder.
_OLDER = "megatron_core-0.16.1"
_OVER_LATER_INTERFACE = ("flashinfer", "transformer_engine")
_TESTS = ROOT / "python" / "tests"
_STUBS = _TESTS / "engines" / "transformer_engine_stubs.py"
_WHOLE_LIBRARY = "transformer_engine/wheel_lib/libtransformer_engine.so"
_ALL_SKIPPED = re.compile(r"^SKIPPED \[\d+\] \S+: (.*\S)$", re.MULTILINE)


def folders(environment: Mapping[str, str]) -> list[pathlib.Path]:
    """Those that NCCL_EP_ENGINES names, else what scripts/engines.py has fetched, if it has."""
    named = [pathlib.Path(each) for each in environment.get("NCCL_EP_ENGINES", "").split(os.pathsep) if each]
    for each in named:
        if not each.is_dir():
            raise SystemExit(f"NCCL_EP_ENGINES: there is no folder {each}")
    fetched_here = fetched(environment) / "engines"
    return named or [each for each in (fetched_here,) if each.is_dir()]


def host_steps(places: Places) -> list[Step]:
    """All steps on the CPU stand-ins."""
    steps = [Step(f"engines/{name}/{ranks}", python_steps.forked(ranks, *_words(name)), _read, python_steps.NEEDS,
                  timeout=240, environment=_environment(places, name)) for name in _OVER_DEEP_EP for ranks in _RANKS]
    steps.append(Step(f"engines/{_OLDER}/2", python_steps.forked(2, *_words("megatron_core")), _read,
                      python_steps.NEEDS, timeout=240, environment=_environment(places, _OLDER)))
    later = [("python/later-interface", "nccl_ep", 2),
             *((f"engines/{name}/{ranks}", name, ranks) for name in _OVER_LATER_INTERFACE for ranks in _RANKS)]
    return steps + [Step(step, lambda words=words: _later(places, *words), needs=python_steps.NEEDS)
                    for step, *words in later]


def gpu_steps(machine: Machine, step: Callable[..., Step]) -> list[Step]:
    """Over NCCL, rank i on GPU i; none where there are no files. `step` is of `on_gpus`."""
    found = folders(machine.environment)
    if not found:
        return []
    words = {name: python_steps.pytest_words(_TESTS / "engines" / f"test_{name}.py", "-rs", root=_TESTS)
             for name in (*_OVER_DEEP_EP, *_OVER_LATER_INTERFACE)}
    return [step(f"engines/{name}/{ranks}", ranks, each, _read,
                 (("NCCL_EP_ENGINES", _joined(found)), *_preloaded(machine, name)))
            for name, each in words.items() for ranks in _RANKS if ranks <= len(machine.devices)]


def _preloaded(machine: Machine, name: str) -> list[tuple[str, str]]:
    """FlashInfer works with NVIDIA's package, which takes functions that are loaded already."""
    if name != "flashinfer":
        return []
    prebuilt = machine.programs / "second" / "libnccl_ep.so.0"
    built = pathlib.Path(machine.environment["NCCL_EP_RELEASE"]) / "libnccl_ep_2.so"
    return [("LD_PRELOAD", str(prebuilt if prebuilt.exists() else built)),
            ("PYTHONPATH", python_steps.gpu_path(machine, "pytest", "nccl-ep"))]


def _words(name: str) -> tuple[str, ...]:
    return python_steps.forked_pytest(_TESTS / "engines" / f"test_{name}.py", "-rs", root=_TESTS)


def _joined(found: Sequence[pathlib.Path]) -> str:
    return os.pathsep.join(map(str, found))


def _environment(places: Places, name: str = "") -> tuple[tuple[str, str], ...]:
    """NumPy, which Megatron-Core needs, is beside NVIDIA's package."""
    own = python_steps.on_stand_ins(places)
    path = os.pathsep.join((own["PYTHONPATH"], str(places.deps / "nccl-ep")))
    found = [each / name if name == _OLDER else each for each in folders(places.environment)]
    return tuple({**own, "PYTHONPATH": path, "NCCL_EP_ENGINES": _joined(found)}.items())


def _read(finished: Finished) -> Counts:
    """A closing line; a file that skips each of its tests says why."""
    why = _ALL_SKIPPED.search(finished.output)
    if why and finished.status == 0 and not finished.timed_out and "\n0 passed, 0 failed\n" in finished.output:
        return Counts(0, 0, skipped=why[1])
    return counts.closing_line(finished)


def _later(places: Places, name: str, ranks: int) -> tuple[Counts, str]:
    """Clients of the later interface, which find functions that are loaded already."""
    tops = folders(places.environment) if name == "transformer_engine" else []
    library = next((each for top in tops for each in (top / _WHOLE_LIBRARY, *top.glob(f"*/{_WHOLE_LIBRARY}"))
                    if each.exists()), None)
    stand_ins = places.libraries / "libncclep_hostsim.so"
    preloaded = [places.libraries / "libnccl_ep_2.so", stand_ins]
    with tempfile.TemporaryDirectory() as home:
        (pathlib.Path(home) / "libnccl.so.2").symlink_to(stand_ins)
        if library:  # what it needs and the stand-ins lack, in a folder that the loader looks into
            stubs = command.run(("python3", str(_STUBS), str(library), str(stand_ins), home), places.environment, 60)
            if stubs.status != 0:
                return counts.build(stubs), stubs.output
            preloaded.insert(0, pathlib.Path(home) / "stubs.so")
        finished = command.run(python_steps.forked(ranks, *_words(name)), {
            **places.environment, **dict(_environment(places)), "LD_LIBRARY_PATH": home,
            "LD_PRELOAD": ":".join(map(str, preloaded))}, 120)
    return _read(finished), finished.output
