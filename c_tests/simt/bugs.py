"""The bugs that planted_bugs.py plants: one change each, of the kind that is easily made.

Each names the run that must notice it: ranks, program, options. Kept few, since each costs a
compilation: one for each thing that the kernels rest on.
"""

from __future__ import annotations

import dataclasses

STYLES = "3 test_ll routing_styles"
UNEVEN = "3 test_ll uneven_tokens"
STAGED = "2 test_staged one_at_a_time"
WIDTHS = "2 test_ll widths"


@dataclasses.dataclass(frozen=True)
class Bug:
    name: str
    file: str
    old: str
    new: str
    run: str = STYLES


BUGS = (
    # ---- Banks, marks, epochs -------------------------------------------------------------------
    Bug("always the same bank", "common/ll.cuh", "? epoch & 1 :", "? 0u :", UNEVEN),
    Bug("marks are not put back", "common/ll.cuh", "    marks.store(from.data, chunk);", ""),
    Bug("no flag for data with marks", "common/ll.cuh", "    if (has_mark) {", "    if (false) {",
        UNEVEN),
    Bug("flag before the other lanes' data", "common/ll.cuh",
        "    if (has_mark) {\n        __syncwarp();", "    if (has_mark) {"),
    Bug("relaxed flag", "common/ll.cuh",
        "st_release_sys(to.flags + chunk.index,", "st_relaxed_sys(to.flags + chunk.index,"),
    Bug("last chunk too long", "common/ll.cuh",
        "(left < shape.chunk_bytes ? left : shape.chunk_bytes)", "shape.chunk_bytes", WIDTHS),
    Bug("a staged send does not wait for the bank", "common/ll.cuh",
        "    if (op.common.track == LL_WHOLE_TRACK) {\n        return;",
        "    if (true) {\n        return;", STAGED),
    Bug("acknowledged while others still read", "common/ll.cuh",
        "    __syncthreads();  // the block has read all that it will read\n", "", STAGED),
    # ---- Dispatch -------------------------------------------------------------------------------
    Bug("entries still being counted", "ll_dispatch.cu",
        "    count_entries(block, first, all);\n    __syncthreads();",
        "    count_entries(block, first, all);"),
    Bug("counts summed before all came", "ll_dispatch.cu",
        "                                  .data;\n    }\n    meet_routers();\n    for (uint32_t exp",
        "                                  .data;\n    }\n    for (uint32_t exp"),
    Bug("wrong parity", "ll_dispatch.cu",
        "mbarrier_test_wait(barrier, 0)", "mbarrier_test_wait(barrier, 1)"),
    Bug("mask of half a warp", "ll_dispatch.cu",
        "__match_any_sync(kAllLanes, expert)", "__match_any_sync(0xffffu, expert)"),
    Bug("slot by the sender's number of tokens", "ll_dispatch.cu",
        "op.rank() * block.shape.max_tokens + token", "op.rank() * block.shape.tokens + token",
        UNEVEN),
    Bug("past the end of shared memory", "ll_dispatch.cu",
        "i < num_experts(block) * 2;", "i < num_experts(block) * 64;"),
    # ---- Combine --------------------------------------------------------------------------------
    Bug("weights not waited for", "ll_combine.cu",
        "weight = wait_for_weight(block, named, home, token);", "weight = 0.5f;"),
    Bug("ends before all peers have begun", "ll_combine.cu",
        "            check_signature(op, peer);\n", "", "3 test_ll no_tokens_anywhere"),
)
