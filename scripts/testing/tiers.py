"""The two tiers of the test run: `make test`, which is to end within 15 minutes on 2 cores, and `make test-all`; and
what only runs if it is named.

Each case of a suite that runs on a backend, on one node or over several, does so in `make test`. What only the other
has shows the same again on more ranks, in other splits or with sanitizers, makes a release, or tests the tests.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from testing.step import Step

# Patterns of names, as of files, of steps that `make test` leaves to `make test-all`.
ONLY_ALL = (
    # The suites again, built with sanitizers, which see the programs and what the CPU backend copies.
    "build/sanitizer", "sanitize/*",
    # What a release needs beside the libraries. `make check` has rustdoc.
    "rust/doc", "build/other-architectures", "package/release", "aarch64/release",
    # Whether tests can fail.
    "simt/planted-bugs",
    # The CPU backend on more ranks, where 1 and 3 show the same and others have exact sums on 4; test_staged and the
    # programs remain. Of deaths 4 ranks remain.
    "test_death/[28]", "test_ll/[48]", "test_ht/8", "test_formats/[38]", "test_graph/[48]",
    "test_stress/[48]",
    "test_errors/3", "test_lifecycle/[24]", "test_random/[28]", "example_*/8", "test_cxx*/8", "ep_bench/*/[38]",
    "ep_test/??-none-*", "ep_test/??-dispatch*", "ep_test/??-combine*", "fake_nccl/*/1",
    # And in more splits over nodes: 0101 and 0001 have whole suites.
    "nodes/test_*/01", "nodes/test_formats/0001", "nodes/test_ll/00112233", "nodes/test_formats/casts/*",
    "nodes/test_staged/00001111",
    # Kernels on the CPU: formats, sums and places of tensors that test_random mixes as well.
    "simt/ep_bench/ll-cast-mxfp8/*", "simt/ep_bench/ht-cast-fp8-pow2/*", "simt/ep_bench/ll-uneven/*",
    "simt/test_ll/rank_major/exact/*", "simt/test_random/choices/*", "simt/test_graph/mixed/*",
    "simt/test_errors/mapped/*", "simt/test_faults/groups",
    "simt/test_fuzz/threads/*",
    # And over nodes: more ranks and more passes; 01 and 0101 have whole suites.
    "simt/nodes/invariant/test_ht/*", "simt/nodes/test_graph/two_*", "simt/nodes/late/test_stress/*",
    "simt/nodes/test_stress/0101", "simt/nodes/test_stress/0123", "simt/nodes/test_stress/00001111",
    "simt/nodes/test_random/00112233", "simt/nodes/test_random/012201", "simt/nodes/odd-grids/*",
    "simt/nodes/test_fuzz/differ/*",
    # Python on unequal nodes and the examples on one, where one program or document has each.
    "python/nodes-0001/*", "python/examples/*",
)

# Whether engines run, whose files `make test-engines` fetches.
ONLY_NAMED = ("engines/*",)


def unnamed(steps: Sequence[Step]) -> list[Step]:
    """The steps of `make test-all`."""
    return _without(steps, ONLY_NAMED)


def usual(steps: Sequence[Step]) -> list[Step]:
    """The steps of `make test`."""
    return _without(steps, (*ONLY_ALL, *ONLY_NAMED))


def _without(steps: Sequence[Step], patterns: Sequence[str]) -> list[Step]:
    return [step for step in steps if not any(fnmatch.fnmatchcase(step.name, pattern) for pattern in patterns)]
