"""More of bugs.py: operations in high throughput on memory that peers map."""

from __future__ import annotations

from planting import Bug, Change

# All tensors in memory that peers map; or on each rank others.
HT_MAPPED = "3 EP_TEST_MEMORY=mapped test_ht uneven_tokens"
HT_MAPPED_AGAIN = "3 EP_TEST_MEMORY=mapped test_ht ht_unordered"
HT_MIXED = "3 EP_TEST_MEMORY=mixed test_random --configs 60 --seed 31"

# Rank 0 is late in operations on memory that peers map, so others may be far ahead of it; or reads slowly.
LATE_TO_OFFER = Change("ht/offers.cuh", "    const bool can_offer = offers.failure == 0",
                       "    for (uint32_t i = common.peers.rank == 0 ? 4000 : 0; i > 0; --i) spin_hint();\n"
                       "    const bool can_offer = offers.failure == 0")
SLOW_HOME = Change("ht/pull_rows.cuh", "            const uint8_t* full = pipeline.wait_full();",
                   "            for (uint32_t i = block.common.peers.rank == 0 ? 4000 : 0; i > 0; --i) spin_hint();\n"
                   "            const uint8_t* full = pipeline.wait_full();")

BUGS = (
    Bug("done before the last rows were stored", "ht/direct_rows.cuh",
        "    pipeline.wait_stored();\n", "", HT_MAPPED),
    Bug("tokens that are not there for the next operation", "ht/offers.cuh",
        "            st_relaxed_gpu(&mapped.state->tokens_taken, 0u);\n", "", HT_MAPPED),
    Bug("done without a fence", "ht/offers.cuh",
        "        fence_acq_rel_sys();\n        const uint32_t last = gridDim.x - 1;\n"
        "        offers.is_last_block = inc_acq_rel_gpu(&mapped.state->blocks_done, last) == last;",
        "        offers.is_last_block = atomicAdd(&mapped.state->blocks_done, 1u) % gridDim.x == gridDim.x - 1;",
        HT_MAPPED),
    Bug("done before all blocks have stored", "ht/offers.cuh",
        "offers.is_last_block = inc_acq_rel_gpu(&mapped.state->blocks_done, last) == last;",
        "offers.is_last_block = blockIdx.x == 0;", HT_MAPPED),
    Bug("offered before it is known that there is room", "ht/offers.cuh",
        " && has_room(offers.total)", "", "2 EP_TEST_MEMORY=mapped test_ht ht_token_output"),
    Bug("the own offset used for peers", "ht/offers.cuh",
        "uint64_t{word(kOfferFirst)} * HT_OFFER_UNIT;", "mapped.offset;", HT_MAPPED),
    Bug("an offer of another epoch", "ht/offers.cuh",
        "all = all && packet_epoch(packets[i]) == epoch;", "all = all && packet_epoch(packets[i]) != 0;",
        HT_MAPPED_AGAIN),
    Bug("all offers in one bank", "ht/offers.cuh", "(epoch & 1) * common.peers.ranks", "0 * common.peers.ranks",
        HT_MIXED),
    Bug("offers that are not awaited", "ht/offers.cuh",
        "if (blockIdx.x == 0 && !agreement.has_all_offers) {", "if (false) {", HT_MIXED,
        beside=(LATE_TO_OFFER,)),
    Bug("a tensor offered by some taken for all", "ht/offers.cuh", "        offers.are_mapped = 0;\n", "",
        HT_MIXED),
    Bug("a combine that ends while its rows are read", "ht/pull_rows.cuh",
        "        wait_until_done(block.common, mapped, offers);\n", "", HT_MIXED, beside=(SLOW_HOME,)),
    Bug("what came beside rows read before done", "ht/direct_rows.cuh",
        "if (!wait_until_done(common, mapped, block.offers) || mapped.side_row_bytes == 0) {",
        "if (mapped.side_row_bytes == 0) {", HT_MAPPED),
    Bug("a stage filled while it is read", "ht/pipeline.cuh", "            bulk_store_wait_read<1>();\n", "",
        HT_MAPPED),
    Bug("the parity of a stage", "ht/pipeline.cuh", "        parity_ ^= using_ == 0;\n", "", HT_MAPPED),
)
