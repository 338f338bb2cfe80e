"""The list of all steps, in the order in which they start.

Builds come first, because everything else needs them, and what shares the cores with them; then checks of sources,
files and packages; then the C programs of programs.py, which take the most time.
"""

from __future__ import annotations

import dataclasses
import re

from testing import abi_checks, architectures, counts, engine_steps, programs, python_steps, simt
from testing.step import BUILT, ROOT, SETUP, WITHOUT_KERNELS, Places, Step


def all_steps(places: Places) -> list[Step]:
    """All steps for a machine without a GPU."""
    path = (("PYTHONPATH", str(ROOT / "scripts")),)
    aarch64 = str(ROOT / "c_tests" / "aarch64" / "run.sh")
    return [
        # It sleeps.
        Step("runner/self-test", ("python3", "scripts/testing/selftest.py"), counts.exit_status, cores=0,
             environment=path),
        Step("scripts/self-test", ("python3", "-m", "unittest", "testing.scripts_selftest", "testing.install_selftest",
                                   "testing.engines_selftest"), counts.exit_status, environment=path),
        Step("build-script/self-test", ("python3", "scripts/testing/build_selftest.py"),
             counts.exit_status, environment=path),
        *_builds(places),
        Step("documents/site", ("make", "docs"), counts.exit_status, (python_steps.FETCHED,)),
        *architectures.steps(places),
        *_rust(),
        *abi_checks.steps(places),
        *_packages(places),
        # They keep hardly more than one core busy each.
        Step("aarch64/emulated", (aarch64, "programs"), counts.closing_line, (python_steps.FETCHED,), timeout=600),
        Step("aarch64/release", (aarch64, "release"), counts.closing_line, ("aarch64/emulated",), timeout=600),
        *programs.host_steps(places),
        *simt.steps(places),
        Step("nvtx/ranges", (str(ROOT / "c_tests" / "nvtx" / "run.sh"),
                             str(places.target / "c" / "host" / "example_high_throughput")),
             counts.closing_line, ("build/programs",),
             environment=(("NCCLEP_HOSTSIM_WITH_GPU", "1"),)),
        # It starts some sixty programs one after the other, each of which sleeps until its ranks have met.
        Step("bench/self-test", ("python3", "bench/selftest.py"), counts.closing_line,
             ("build/programs",), cores=0, environment=(("NCCLEP_HOSTSIM_WITH_GPU", "1"),)),
        *python_steps.host_steps(places),
        *engine_steps.host_steps(places),
        *programs.sanitizer_steps(places),
    ]


def _make_programs(places: Places, goal: str, *settings: str) -> tuple[str, ...]:
    return ("make", "-j2", "--no-print-directory", "-C", "c_tests", goal, f"EP_LIBDIR={places.libraries}", *settings)


def only_needed(steps: list[Step], places: Places) -> list[Step]:
    """The same, but builds of C programs make only those that the others run."""
    return [_narrowed(step, steps, places) for step in steps]


def _narrowed(build: Step, steps: list[Step], places: Places) -> Step:
    # What make is asked for, the folder of it, and what runs from there without being named.
    made = {"build/programs": ("host", "c", ()),
            "build/sanitizer": ("host", "c-sanitize", ()),
            "build/simt": ("simt", "c", ("simt/lib/libncclep_simt_kernels.so",))}.get(build.name)
    if not made:
        return build
    goal, folder, unnamed = made
    out = places.target / folder
    goals = {str(out / name) for name in unnamed}
    for step in steps:
        if build.name not in step.needs or step.name == "build/simt":
            continue
        words = () if callable(step.command) else step.command
        settings = (value for _, value in step.environment)
        named = re.findall(rf"{re.escape(str(out))}/\S+/[^\s/]+", " ".join((*words, *settings)))
        if not named:
            return build  # It may run any of them.
        goals.update(named)
    at = build.command.index(goal)
    # A build that only another one needs makes something small.
    chosen = sorted(goals) or [str(out / "flags")]
    return dataclasses.replace(build, command=(*build.command[:at], *chosen, *build.command[at + 1:]))


def gpu_builds(places: Places) -> list[Step]:
    """The builds that the programs on GPUs need."""
    library = ("cargo", "build", "--release", "--locked", "--workspace")
    gpu = _make_programs(places, "gpu", f"OUT={places.target}/c")
    return [
        Step("build/lib", library, counts.build, cores=2, timeout=None),
        Step("build/programs-gpu", gpu, counts.build, ("build/lib",), cores=2, timeout=None),
    ]


def _builds(places: Places) -> list[Step]:
    library, gpu = gpu_builds(places)
    test = ("cargo", "test", "--locked", "--workspace", "--no-fail-fast")
    linted = _linted()
    host = _make_programs(places, "host", f"OUT={places.target}/c")
    sanitized = _make_programs(places, "host", "SANITIZE=address,undefined", "OPTIMISE=-O1 -g1",
                               f"OUT={places.target}/c-sanitize")
    return [
        # They wait for the network more than for a core.
        Step(SETUP, ("scripts/setup.sh",), counts.build, cores=0, timeout=None),
        python_steps.setup(),
        # Each often waits for one compiler, so they share the cores; cargo locks neither's folder.
        dataclasses.replace(library, cores=1),
        Step("build/rust-tests", (*test, "--no-run"), counts.build, timeout=None, environment=linted),
        Step("rust/test", test, counts.cargo_test, ("build/rust-tests",), timeout=600, environment=linted),
        dataclasses.replace(gpu, needs=BUILT),
        Step("build/programs", host, counts.build, BUILT, cores=2, timeout=None),
        Step("build/sanitizer", sanitized, counts.build, BUILT, cores=2, timeout=None),
    ]


def _linted() -> tuple[tuple[str, str], ...]:
    """For cargo where clippy compiles the project: a second run of it would take half as long as the compiler."""
    return (*WITHOUT_KERNELS, ("RUSTC_WORKSPACE_WRAPPER", "clippy-driver"), ("CARGO_PROFILE_DEV_DEBUG", "0"))


def _rust() -> list[Step]:
    # cargo repeats what was said of that which it finds made, and makes what tests leave out.
    clippy = ("cargo", "build", "--locked", "--workspace", "--all-targets")
    doc = ("cargo", "doc", "--locked", "--workspace", "--no-deps", "--document-private-items")
    deny = (*WITHOUT_KERNELS, ("RUSTDOCFLAGS", "-D warnings"))
    # Of one core each, so that they run beside the last of build/lib, which is one compiler.
    return [
        Step("rust/fmt", ("cargo", "fmt", "--all", "--check"), counts.exit_status),
        Step("rust/clippy", clippy, counts.no_warning, ("build/rust-tests",), timeout=None, environment=_linted()),
        Step("rust/doc", doc, counts.exit_status, timeout=None, environment=deny),
    ]


def _packages(places: Places) -> list[Step]:
    def script(name: str) -> tuple[str, ...]:
        return (str(ROOT / "c_tests" / "package" / name / "run.sh"), str(places.libraries))

    return [
        Step("package/third-party", (str(ROOT / "scripts" / "third_party.py"), "--check"), counts.exit_status),
        Step("package/release", (str(ROOT / "c_tests" / "package" / "release" / "run.sh"),),
             counts.closing_line, BUILT),
        Step("package/readme", script("readme"), counts.closing_line, BUILT),
        Step("package/consumer", script("consumer"), counts.closing_line, BUILT),
        Step("package/examples", script("examples"), counts.closing_line, BUILT,
             environment=(("NCCLEP_HOSTSIM_WITH_GPU", "1"),)),
        Step("package/drop-in", script("dropin"), counts.closing_line, BUILT),
    ]
