"""Those of routes, and of rows that lie by expert (bugs.py)."""

from __future__ import annotations

from planting import Bug

HT = "3 test_ht uneven_tokens"
ZONES = "3 test_second high_throughput_delivers"
ZONES_NODES = "3 NODES=001 test_second high_throughput_delivers"
INVARIANT = "NCCL_EP_NODE_SUMS=invariant test_second high_throughput_delivers"
CUT = "3 test_second what_is_beyond"
CUT_NODES = "3 NODES=001 test_second what_is_beyond"

BUGS_OF_ROUTES = (
    Bug("experts of rows before they are told", "ht/zones.cu",
        "late |= packet_epoch(packet[i]) != block.epoch ? 1u << i : 0;", "late |= 0;",
        "3 test_second handles_take_turns"),
    Bug("an epoch that no block counts", "ht/route.cu", "        st_relaxed_gpu(params.epochs, block.epoch());\n", "",
        "2 test_second updates_are_captured"),
    Bug("an epoch counted before all blocks have read it", "ht/route.cu",
        "        shared.epoch = epoch_after(ld_relaxed_gpu(params.epochs));\n",
        "        shared.epoch = epoch_after(ld_relaxed_gpu(params.epochs));\n"
        "        if (blockIdx.x == gridDim.x - 1) st_relaxed_gpu(params.epochs, shared.epoch);\n",
        HT),
    Bug("one bank for all kernels", "ht/route.cu", "return shared.epoch % 2;", "return 0;",
        "2 test_second late_to_hear"),
    Bug("a row's experts of earlier words not counted", "ht/zones.cu",
        "(data >> kZoneBeforeShift) % HT_MAX_TOP_K + ", "", ZONES),
    Bug("slots that begin with those of the first rank", "ht/zones.cu", "earlier < source;", "earlier < 0;", ZONES),
    Bug("counts of another handle", "ht/zones.cuh", "const uint64_t bank = epoch % 2;", "const uint64_t bank = 0;",
        "3 test_second updates_by_expert"),
    Bug("rows numbered before all warps have counted", "ht/zones.cu",
        "    __syncthreads();\n    uint32_t slot = next", "    uint32_t slot = next", ZONES),
    Bug("zones that are not filled up", "ht/zones.cu", "return (count + mask) & ~mask;", "return count;", ZONES),
    Bug("no end of a row's slots", "ht/zones.cu", "        slots[i] = HT_NO_SLOT;\n", "",
        "2 test_second updates_by_expert"),
    Bug("slots beyond the bound", "ht/zones.cu", "slot < zones.limit ? slot : HT_DROPPED", "slot",
        CUT),
    Bug("dropped rows whose ids stay", "ht/cut.cu", "ids[k] == entry.expert ? kNowhere : ids[k]",
        "ids[k]", CUT),
    Bug("dropped rows that count", "ht/cut.cu", "        if (stay > 0 && stay < all) {", "        if (false) {", CUT),
    Bug("rows of a handle before that count", "ht/cut.cu", "        st_relaxed_gpu(params.tally + i, 0);\n", "",
        "3 test_second updates_that_drop"),
    Bug("a bound for each source", "ht/cut.cu", "block.cut(handle.begins[rank + 1]) - block.cut(handle.begins[rank])",
        "block.cut(handle.begins[rank + 1] - handle.begins[rank])", CUT),
    Bug("a bound for each source over nodes", "ht/room_nodes.cu",
        "min(end, params.limit) - min(begin, params.limit)", "min(end - begin, params.limit)", CUT_NODES),
    Bug("rows that nobody says are dropped", "ht/room_nodes.cu", "all > params.limit ? HT_ROOM_DROPS : 0", "0",
        CUT_NODES),
    Bug("experts told in the name of the forwarder", "ht/zones.cuh", "uint64_t{source} * zone_words",
        "uint64_t{params.peers.rank} * zone_words", ZONES_NODES),
    Bug("one bank for what is told of rows", "ht/zones.cuh", "epoch % 2 * packets.bank_bytes", "0 * packets.bank_bytes",
        "2 test_second late_to_hear"),
    Bug("slots found while rows are counted", "ht/zones.cu", "    wait_for_grid();\n", "", ZONES),
    Bug("ids that are not kept", "ht/route.cu", "kept != nullptr && token < last", "false",
        "2 test_second high_throughput_delivers_flat"),
    Bug("zeros where nothing comes", "ht/dispatch_local.cuh", "block.params.fills_rest != 0", "true",
        "2 test_second high_throughput_delivers_flat"),
    Bug("gradients of slots that are dropped", "ht/zoned_input.cuh", "return is_slot(slot, block.params.in_rows) ?",
        "return slot != HT_NO_SLOT ?", CUT_NODES),
    Bug("rows in their first slot alone", "ht/zoned_rows.cuh", "left.any(); left.drop_first()", "left.any(); left = {}",
        ZONES_NODES),
    Bug("sums of other nodes not loaded", "ht/zoned_input.cuh", "return phase == 3 ? nodes_before : nodes_behind;",
        "return {};", ZONES_NODES),
    Bug("the sum of the own node not rounded", "ht/zoned_input.cuh", "partials.rounds_own_node();", "false;",
        f"3 NODES=001 {INVARIANT}"),
    Bug("the sum of the own node behind all", "ht/zoned_input.cuh", "partials.is_before_own(place)", "true",
        f"3 NODES=012 {INVARIANT}"),
    Bug("pads with what was there", "ht/zoned_rows.cuh", "        if (number < pads) {", "        if (false) {", ZONES),
    Bug("the own rank's slots not rounded", "ht/zoned_input.cuh", "        clear_sum<Type>(sum);\n    }\n", "    }\n",
        ZONES),
    Bug("the own rank's sum behind all", "ht/zoned_input.cuh", "all.behind = parts.behind(own.first());",
        "all.behind = {};", ZONES),
    Bug("a sum over one that is on its way", "ht/zoned_input.cuh", "            buffers.wait_reusable();\n", "", ZONES),
    Bug("parts that are added before they have come", "ht/zoned_input.cuh",
        "async_load_wait<HT_ZONE_STAGES - 1>", "async_load_wait<HT_ZONE_STAGES>", ZONES),
    Bug("gradients by expert, not by k", "ht/by_k.cu",
        "gradient = shuffle(gradient, experts_below(expert, top_k));", "", ZONES),
    Bug("a peer's failure that leaves memory without a header and a reason", "handle_header.cu",
        "failure != kOwnFailure && word == 0", "false", "3 test_second beside_a_failure"),
)
