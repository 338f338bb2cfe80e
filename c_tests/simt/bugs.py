"""The bugs that planted_bugs.py plants: one change each, of the kind that is easily made.

Each names the run that must notice it: ranks, settings as NAME=VALUE, program, options. Kept few,
since each costs a compilation: one for each thing that the kernels rest on. Slow ones, which let
ranks wait for what never comes, have no part in make test.
"""

from __future__ import annotations

import dataclasses

STYLES = "3 test_ll routing_styles"
UNEVEN = "3 test_ll uneven_tokens"
HT_MOST = "2 test_ht most_rows"
STAGED = "3 test_staged one_stays_in_flight"
HT = "3 test_ht uneven_tokens"
HT_MANY = "3 test_ht many_tokens"
REFUSAL = "3 test_errors ht_handle_refused"
WIDTHS = "2 test_ll widths"
LATE = "2 test_ll ll_nothing_is_sent_behind_a_failure"
DIFFERENT = "3 test_errors ll_different_calls"
# A dispatch of as many tokens as there may be, on all ranks.
LL_MOST = "2 test_ll ll_handle_while_a_dispatch_waits"


@dataclasses.dataclass(frozen=True)
class Lie:
    """A change of the kernels of rank 0 alone, which the others must bear: the run passes with it."""

    file: str
    old: str
    new: str


@dataclasses.dataclass(frozen=True)
class Bug:
    """A change of the kernels, of all ranks or, where rank 0 lies, of the others."""

    name: str
    file: str
    old: str
    new: str
    run: str = STYLES
    slow: bool = False
    lie: Lie | None = None


# With it rows that follow those of rank 0 begin before the output, and few rows seem to come in all.
MANY_ROWS = Lie("ht_layout.cu", "st_relaxed_sys(counts, make_packet(epoch, rows));",
                "st_relaxed_sys(counts, make_packet(epoch, peer == rank ? rows : 0u - 4));")
MANY_FOR_EXPERTS = Lie("ht_layout.cu", "make_packet(epoch, ld_relaxed_gpu(block.rows_for(i)))",
                       "make_packet(epoch, 0x7fffffffu)")
# In the place where a rank might look for its own numbers.
FOR_ITSELF = Lie(
    "ht_layout.cu", "        st_relaxed_sys(counts + 1, make_packet(epoch, block.params.told));\n",
    "        st_relaxed_sys(counts + 1, make_packet(epoch, block.params.told));\n"
    "        if (peer != rank) st_relaxed_sys(counts + (peer - rank) * (local_experts + 2),"
    " make_packet(epoch, 1));\n")
STRAY_IDS = Lie("common/ht_routing.cuh", "static_cast<uint32_t>(id);\n    }",
                "static_cast<uint32_t>(id + 1000);\n    }")
MANY_TOKENS = Lie("common/ll_dispatch_routers.cuh", ": block.shape.tokens;",
                  ": block.shape.tokens + 1000;")
# Of the entries that are for others.
STRAY_EXPERTS = Lie("common/ll_dispatch_routers.cuh", "uint32_t data = kElsewhere;",
                    "uint32_t data = 1000u << kPlaceBits;")

BUGS = (
    # ---- Banks, marks, epochs -------------------------------------------------------------------
    Bug("always the same bank", "common/ll.cuh", "? track_epoch & 1 :", "? 0u :", UNEVEN, slow=True),
    Bug("marks are not put back", "common/ll_rows.cuh", "    marks.store(from.data, chunk);", ""),
    Bug("no flag for data with marks", "common/ll_rows.cuh", "    if (has_mark) {", "    if (false) {",
        UNEVEN, slow=True),
    Bug("flag before the other lanes' data", "common/ll_rows.cuh",
        "    if (has_mark) {\n        __syncwarp();", "    if (has_mark) {"),
    Bug("relaxed flag", "common/ll_rows.cuh",
        "st_release_sys(to.flags + chunk.index,", "st_relaxed_sys(to.flags + chunk.index,"),
    Bug("last chunk too long", "common/ll_rows.cuh",
        "(left < shape.chunk_bytes ? left : shape.chunk_bytes)", "shape.chunk_bytes", WIDTHS,
        slow=True),
    Bug("a staged send does not wait for the bank", "common/ll.cuh",
        "    if (op.common.track == LL_WHOLE_TRACK) {\n        return true;",
        "    if (true) {\n        return true;", STAGED),
    Bug("acknowledged while others still read", "common/ll.cuh",
        "    __syncthreads();  // the block has read all that it will read\n", "", STAGED,
        slow=True),
    Bug("a deadline that peers are not told of", "common/wait.cuh",
        "        tell_failure(common.peers, wait);\n", "", "3 test_errors ll_rank_that_stops",
        slow=True),
    Bug("sent behind a failure", "common/ll.cuh", "return start.failed == 0 && !is_void;",
        "return !is_void;", LATE),
    Bug("sent to a bank that was not released", "common/ll.cuh",
        "    return __syncthreads_or(held) == 0;", "    (void)__syncthreads_or(held);\n    return true;",
        "2 test_ll ll_nothing_is_sent_to_a_bank_in_use", slow=True),
    Bug("a difference that the others are not told of", "common/ll.cuh",
        "        tell_failure(op.common.peers, op.common.wait);\n", "", DIFFERENT, slow=True),
    Bug("one rank stages and nobody notices", "common/ll.cuh",
        "    return has_begun &&\n", "    return false &&\n", DIFFERENT, slow=True),
    # ---- Dispatch -------------------------------------------------------------------------------
    Bug("entries still being counted", "common/ll_dispatch_routers.cuh",
        "    count_entries(block, first, all, early);\n    __syncthreads();",
        "    count_entries(block, first, all, early);"),
    Bug("counts summed before all came", "common/ll_dispatch_routers.cuh",
        ".data;\n    }\n    meet_routers();\n    for (uint32_t exp",
        ".data;\n    }\n    for (uint32_t exp"),
    Bug("wrong parity", "ll_dispatch.cu",
        "mbarrier_test_wait(barrier, 0)", "mbarrier_test_wait(barrier, 1)", slow=True),
    Bug("mask of half a warp", "common/ll_dispatch_routers.cuh",
        "__match_any_sync(kAllLanes, expert)", "__match_any_sync(0xffffu, expert)"),
    Bug("slot by the sender's number of tokens", "ll_dispatch.cu",
        "op.rank() * block.shape.max_tokens + token", "op.rank() * block.shape.tokens + token",
        UNEVEN, slow=True),
    Bug("past the end of shared memory", "ll_dispatch.cu",
        "i < num_experts(block) * 2;", "i < num_experts(block) * 64;"),
    # ---- Combine --------------------------------------------------------------------------------
    Bug("weights not waited for", "ll_combine.cu",
        "weight = wait_for_weight(block, named, home, token);",
        "weight = {true, __float_as_uint(0.5f)};"),
    Bug("a sum without its weights", "ll_combine.cu",
        "if (__all_sync(kAllLanes, weight.ok)) {", "if (true) {",
        "2 test_ll ll_no_sum_is_sent_without_its_weights", slow=True),
    Bug("the first of equal ids means all", "common/ll_gates.cuh", " || meant != nth) {", ") {",
        "2 test_ll permuted"),
    Bug("added in the order of the dispatch", "common/ll_gates.cuh", "            gate.turn = k;\n",
        "            gate.turn = lane_idx();\n", "2 NCCL_EP_LL_COMBINE=exact test_ll permuted",
        slow=True),
    Bug("ends before all peers have begun", "ll_combine.cu",
        "            check_signature(op, peer);\n", "", "3 test_ll no_tokens_anywhere", slow=True),
    # ---- High throughput ------------------------------------------------------------------------
    Bug("announced without a fence", "common/herald.cuh", "        fence_acq_rel_sys();\n", "", HT),
    Bug("announced before it was copied", "common/carrier.cuh",
        "            bulk_store_wait<1>();\n", "", HT),
    Bug("closed before the last rows were copied", "common/carrier.cuh",
        "            bulk_store_wait<0>();\n", "", HT, slow=True),
    Bug("a mailbox that overflows", "common/herald.cuh",
        "        wait_announced(kMailboxRows - count);\n", "", HT_MANY, slow=True),
    Bug("sent to a slot that is not free", "common/ht_places.cuh",
        "is_or_follows(credit, sequence + 1 - ring.common.layout.depth)", "true", HT_MANY, slow=True),
    Bug("waiting with rows that were not announced", "ht_combine.cu",
        "            mailbox.flush();\n", "", HT_MANY, slow=True),
    Bug("overwritten while it is being copied", "common/carrier.cuh",
        "            bulk_store_wait_read();\n", "", HT, slow=True),
    Bug("parity of a carrier", "common/carrier.cuh", "        parity_ ^= 1;\n", "", HT, slow=True),
    Bug("bytes of a tail not expected", "common/carrier.cuh",
        "mbarrier_arrive_expect(barrier_, bytes + tail_bytes)",
        "mbarrier_arrive_expect(barrier_, bytes)", HT, slow=True),
    Bug("places given before all warps have counted", "ht_layout.cu",
        "        __syncthreads();\n        for (uint32_t rank = threadIdx.x; rank < block.ranks(); "
        "rank += HT_LAYOUT_THREADS) {\n            uint32_t rows",
        "        for (uint32_t rank = threadIdx.x; rank < block.ranks(); "
        "rank += HT_LAYOUT_THREADS) {\n            uint32_t rows", HT, slow=True),
    Bug("a tally that goes on from handle to handle", "ht_layout.cu",
        "        st_relaxed_gpu(block.rows_for(i), 0);\n", "", "3 test_ht ht_without_a_pause",
        slow=True),
    Bug("a refusal that is not told", "ht_layout.cu", "make_packet(epoch, block.params.told)",
        "make_packet(epoch, block.params.handle.top_k)", REFUSAL),
    Bug("a verdict before all have told", "ht_layout.cu",
        "told.data}));\n    }\n    __syncthreads();", "told.data}));\n    }", REFUSAL, slow=True),
    Bug("an operation on a handle that a rank refused", "common/ht.cuh",
        "    if ((pairs.total & HT_DISAGREED) != 0) {", "    if (false) {",
        "2 test_errors ht_handle_used_before", slow=True),
    Bug("an operation behind a failure", "common/ht.cuh",
        "    if (pairs.failure != 0) {", "    if (false) {", "2 test_ht behind_a_failure", slow=True),
    Bug("a failure that only its own rank minds", "common/ht.cuh",
        "own != 0 ? kOwnFailure : teller;", "own != 0 ? kOwnFailure : 0;",
        "2 test_ht behind_a_failure", slow=True),
    Bug("an output without rows taken for none", "ht_dispatch.cu",
        "        if (!rows_fit) {", "        if (params.out != nullptr && !rows_fit) {",
        "2 test_ht outputs_without_rows", slow=True),
    Bug("sums before all rows have come", "ht_combine.cu",
        "    if (part.is_remote) {\n        const uint32_t rank",
        "    if (false) {\n        const uint32_t rank", HT),
    Bug("sequences advanced by a block that is not the last", "common/ht.cuh",
        "    __syncthreads();\n    if (pairs.failure != 0) {", "    if (pairs.failure != 0) {", HT),
    # ---- What a peer tells ----------------------------------------------------------------------
    Bug("more tokens than a rank may have", "common/ll_dispatch_routers.cuh",
        "min(told, block.shape.max_tokens)", "told", LL_MOST, lie=MANY_TOKENS),
    Bug("experts that are not there", "ll_dispatch.cu",
        "entry.ok && entry.data >> kPlaceBits < block.shape.local_experts",
        "entry.ok && entry.data != kElsewhere", LL_MOST, slow=True, lie=STRAY_EXPERTS),
    Bug("more rows than a rank may have", "ht_layout.cu",
        "shared.rows[source] = block.believed(rows.data);", "shared.rows[source] = rows.data;",
        HT_MOST, lie=MANY_ROWS),
    Bug("more rows for an expert than a rank may have", "ht_layout.cu",
        "total += block.believed(hear(block, source, i).data);",
        "total += hear(block, source, i).data;", HT_MOST, slow=True, lie=MANY_FOR_EXPERTS),
    Bug("what a rank tells itself in its window", "ht_layout.cu",
        "        if (owner == source) {", "        if (false) {", HT_MOST, slow=True, lie=FOR_ITSELF),
    Bug("ids of experts that are not there", "common/ht_routing.cuh",
        "        id = static_cast<uint32_t>(id) < common.layout.local_experts ? id : -1;\n", "",
        "2 test_ht ids_in_range", slow=True, lie=STRAY_IDS),
)
