"""The bugs that planted_bugs.py plants: one change each, of the kind that is easily made.

Each names the run that must notice it: ranks, settings as NAME=VALUE, program, options. Kept few,
since each costs a compilation: one for each thing that the kernels rest on.
"""

from __future__ import annotations

from bugs_of_routes import BUGS_OF_ROUTES
from planting import Bug, Change

UNEVEN = "3 test_ll uneven_tokens"
HT_MOST = "2 test_ht most_rows"
STAGED = "3 test_staged one_stays_in_flight"
HT = "3 test_ht uneven_tokens"
HT_MANY = "3 test_ht many_tokens"
REFUSAL = "3 test_errors ht_handle_refused"
WIDTHS = "2 test_ll widths"
LATE = "2 test_ll ll_nothing_is_sent_behind_a_failure"
DIFFERENT = "3 test_errors ll_different_calls"
# With so many blocks some begin after another one of their rank has failed.
LATE_BLOCKS = "3 NCCLEP_SIMT_MULTIPROCESSORS=8 test_errors ll_different_calls"
# With room for blocks of each kind.
FEW = "2 NCCLEP_SIMT_MULTIPROCESSORS=17 test_ll every_top_k"
FEW_OF_MANY = "3 NCCLEP_SIMT_MULTIPROCESSORS=17 test_ll few_where_many rank_major_without"
FEW_BY_RANK = "3 NCCLEP_SIMT_MULTIPROCESSORS=28 test_ll rank_major_shapes"
OVER_NODES = "4 NODES=0123 test_ll uneven_tokens"
RANK_MAJOR = "2 test_ll rank_major_shapes"
VIEWS = "2 test_ll views_shapes"
VIEW_FORMATS = "2 test_ll views_formats_of_many"
# Several stages, several remote sources of a rank, interleaved ranks.
HT_NODES = "4 NODES=0120 NCCL_EP_HT_CHUNK_BYTES=600 test_ht uneven_tokens"
HT_NODES_BACKWARD = "4 NODES=0120 NCCL_EP_HT_CHUNK_BYTES=600 test_ht gradients_with"
# A dispatch of as many tokens as there may be, on all ranks.
LL_MOST = "2 test_ll ll_handle_while_a_dispatch_waits"

# The first epoch of each channel is 6 before the last one. Words that nobody has written yet are then of a later epoch,
# so acknowledgements among them must not count; before a channel's first operation there is nothing to wait for.
_FIRST = "0xfffffffau"
NEAR_THE_WRAP = (
    Change("ll/protocol.cuh", "        epoch = ld_relaxed_gpu(&common.channel_state->epoch);\n",
           "        epoch = ld_relaxed_gpu(&common.channel_state->epoch);\n"
           f"        epoch = epoch == 0 ? {_FIRST} : epoch;\n"),
    Change("ll/protocol.cuh", "    return epoch_after(ld_relaxed_gpu(&channel.epoch));",
           "    const uint32_t last = ld_relaxed_gpu(&channel.epoch);\n"
           f"    return epoch_after(last == 0 ? {_FIRST} : last);"),
    Change("ll/protocol.cuh", "        if (!is_active(op.common.peers, peer)) {\n            continue;",
           f"        if (epoch_before == {_FIRST} || !is_active(op.common.peers, peer)) {{\n            continue;"),
    Change("ll/protocol.cuh", "!all_lanes(is_or_follows(acknowledged = ",
           "!all_lanes(packet_epoch(ld_acquire_sys(ack)) != 0 && is_or_follows(acknowledged = "),
)
# Epochs repeat soon. Operations of equal shape overwrite all other words of a bank meanwhile.
FEW_EPOCHS = (Change("peer/wait.cuh", "return epoch == 0xffffffffu ? 2 : epoch + 1;",
                     "return epoch == 9 ? 2 : epoch + 1;"),)
# Rank 0 is late to clean a bank of views: others may end the combine, and begin the next dispatch, before it has.
LATE_TO_CLEAN = Change("ll/rank_combine.cu", "    const uint32_t bytes = block.shared.cleans;\n",
                       "    const uint32_t bytes = block.shared.cleans;\n"
                       "    for (uint32_t i = block.op.rank() == 0 ? 500 : 0; i > 0; --i) spin_hint();\n")
# Queues that few tokens of a warp fill, as peers are notified late.
SHORT_QUEUES = (Change("ht/notify.cuh", "constexpr uint32_t kQueueRows = HT_MAX_TOP_K;",
                       "constexpr uint32_t kQueueRows = 4;"),
                Change("ht/notify.cuh", "        idle();\n",
                       "        idle();\n        for (uint32_t i = 100; i > 0; --i) spin_hint();\n"))
# Rank 0 reads a source's first row, the first half of a slot, when the source has long gone on: with the next operation
# it comes to that place again.
LATE_FIRST_ROW = Change("ht/dispatch_receive.cuh", "            take_row(block, work.peer, work.index, staging);\n",
                        "            const bool waits = block.common.peers.rank == 0 && work.index == 0;\n"
                        "            for (uint32_t i = waits ? 20000 : 0; i > 0; --i) spin_hint();\n"
                        "            take_row(block, work.peer, work.index, staging);\n")
# With it rows that follow those of rank 0 begin before the output, and few rows seem to come in all.
MANY_ROWS = Change("ht/route.cu", "put_value(counts, make_packet(epoch, rows));",
                   "put_value(counts, make_packet(epoch, block.is_own(peer) ? rows : 0u - 4));")
MANY_FOR_EXPERTS = Change("ht/route.cu", "make_packet(epoch, ld_relaxed_gpu(block.rows_for(i)))",
                          "make_packet(epoch, 0x7fffffffu)")
# Where a rank might look for its own numbers.
FOR_ITSELF = Change(
    "ht/route.cu", "            put_value(counts + 1, make_packet(epoch, block.params.verdict));\n",
    "            put_value(counts + 1, make_packet(epoch, block.params.verdict));\n"
    "            const uint32_t rank = block.params.peers.rank;\n"
    "            if (peer != rank) put_value(counts + (peer - rank) * (local_experts + 2),"
    " make_packet(epoch, 1));\n")
STRAY_IDS = Change("ht/tail.cuh", "static_cast<uint32_t>(id);\n    }", "static_cast<uint32_t>(id + 1000);\n    }")
MANY_TOKENS = Change("ll/dispatch_notices.cuh", "? source.tokens() : word;", "? source.tokens() + 1000 : word;")
# Of the entries that are for others.
STRAY_EXPERTS = Change("ll/dispatch_notices.cuh", "EntryWord word = EntryWord::elsewhere();",
                       "EntryWord word = {1000u << EntryWord::kIndexBits};")

BUGS = (
    # ---- Banks, marks, epochs -------------------------------------------------------------------
    Bug("always the same bank", "ll/protocol.cuh", "? channel_epoch & 1 :", "? 0u :", UNEVEN),
    Bug("sentinels are not put back", "ll/chunk.cuh", "    store(sentinels, from.data, chunk);\n", ""),
    Bug("no flag for data with the sentinel", "ll/chunk.cuh", "    if (with_sentinel) {", "    if (false) {",
        UNEVEN),
    Bug("flag before the other lanes' data", "ll/chunk.cuh",
        "    if (with_sentinel) {\n        sync_warp();", "    if (with_sentinel) {"),
    Bug("relaxed flag", "ll/chunk.cuh",
        "signal(to.flags + chunk.index,", "put_value(to.flags + chunk.index,"),
    Bug("last chunk too long", "ll/chunk.cuh", "return lane_byte(i) < row_bytes;", "return true;", WIDTHS),
    Bug("a staged send does not wait for the bank", "ll/protocol.cuh",
        "return op.channel() == LL_WHOLE_CHANNEL ||", "return true ||", STAGED),
    Bug("acknowledged while others still read", "ll/protocol.cuh",
        "    __syncthreads();  // the block has read all that it will read\n", "", STAGED),
    Bug("a deadline that peers are not told of", "ll/protocol.cuh",
        "fault != FAULT_PEER_FAILED) {", "fault == FAULT_DIFFERS) {", "3 test_errors ll_rank_that_stops"),
    Bug("sent behind a failure", "ll/protocol.cuh", "start.failed == 0 && !is_void;",
        "!is_void;", LATE),
    Bug("sent to a bank that was not released", "ll/protocol.cuh",
        "    return __syncthreads_or(gave_up) == 0;", "    (void)__syncthreads_or(gave_up);\n    return true;",
        "2 test_ll ll_nothing_is_sent_to_a_bank_in_use"),
    Bug("a difference that the others are not told of", "ll/protocol.cuh",
        "fault != FAULT_PEER_FAILED) {", "fault == FAULT_TIMEOUT) {", LATE_BLOCKS),
    Bug("one rank stages and nobody notices", "ll/protocol.cuh",
        "    return has_begun &&\n", "    return false &&\n", DIFFERENT),
    # ---- Dispatch -------------------------------------------------------------------------------
    Bug("entries still being counted", "ll/dispatch_notices.cuh",
        "    count_entries(block, source, first, all);\n    __syncthreads();",
        "    count_entries(block, source, first, all);"),
    Bug("counts summed before all came", "ll/dispatch_notices.cuh",
        "    receive_counts(block, is_first);\n    __syncthreads();", "    receive_counts(block, is_first);"),
    Bug("rows placed before all begins are known", "ll/dispatch_notices.cuh",
        "op.rank(), expert, total);\n        }\n    }\n    __syncthreads();",
        "op.rank(), expert, total);\n        }\n    }"),
    Bug("mask of half a warp", "ll/dispatch_notices.cuh",
        "match(expert)", "LaneMask{__match_any_sync(0xffffu, expert)}"),
    Bug("slot by the sender's number of tokens", "ll/dispatch_send.cuh",
        "block.bank_slots.of_token(source_rank, taken.token)",
        "source_rank * block.shape.tokens + taken.token",
        UNEVEN),
    Bug("scales of another chunk", "ll/scaled_chunk.cuh",
        "min(index * rows.scale_chunk_bytes, padded)", "min(index * shape.chunk_bytes, padded)",
        "2 test_formats casts"),
    Bug("ties rounded up", "base/cast.cuh", "rest > half ||", "rest >= half ||",
        "1 test_formats all_bfloat16"),
    Bug("scales that nobody compares", "ll/dispatch_notices.cuh",
        "op.common.fingerprint : op.common.scales_word)", "op.common.fingerprint : data)",
        "2 test_errors ll_scales_that_differ"),
    Bug("rows without a slot that nobody misses", "ll/dispatch_notices.cuh",
        "if (total > block.output.rows_of_expert()) {", "if (false) {", "2 test_errors ll_repeated_ids"),
    Bug("scales read behind the last one", "base/scales.cuh",
        "part.word[i] = i < count<uint32_t>() ? *at<uint32_t>(i) : 0;",
        "part.word[i] = *at<uint32_t>(i);", "2 test_formats forwarded_scales"),
    Bug("a flag that vouches for later data", "ll/chunk.cuh",
        "    if (is_flagged) {\n", "    if (false) {\n", "2 test_ll unordered_streams", beside=FEW_EPOCHS),
    Bug("an epoch that fresh memory has", "peer/wait.cuh",
        "return epoch == 0xffffffffu ? 2 : epoch + 1;", "return epoch + 1;", STAGED,
        beside=NEAR_THE_WRAP),
    Bug("waiting for what was never sent", "ll/protocol.cuh",
        "        return start.failed == 0 && !is_void;", "        return start.failed == 0;",
        "2 test_graph never_ran"),
    Bug("past the end of shared memory", "ll/dispatch_block.cuh",
        "i < num_experts(block) * 2;", "i < num_experts(block) * 64;"),
    # ---- Of few tokens --------------------------------------------------------------------------
    Bug("rows of all sources begin at the same place", "ll/dispatch_few.cu", "before < source;", "before < 0u;",
        "2 NCCLEP_SIMT_MULTIPROCESSORS=17 test_ll routing_styles"),
    Bug("entries of earlier blocks not counted", "ll/dispatch_notices.cuh",
        "count_entries(block, source, first, all);", "count_entries(block, source, 0u, all);", FEW),
    Bug("tokens that a source does not have", "ll/dispatch_few.cuh", "packet_data(packet) <= unit.token);",
        "packet_data(packet) < unit.token);", FEW),
    Bug("nobody serves ranks with more tokens", "ll/dispatch_few.cuh",
        "knows_counts ? block.shared.most_tokens * of_token : likely;", "likely;", FEW_OF_MANY),
    Bug("flags of large chunks where a rank cuts small ones", "ll/scaled_chunk.cuh",
        "from.flags + chunk.index * kVecs;", "from.flags + chunk.index;", FEW_OF_MANY),
    Bug("rows with scales all at the first one's place", "ll/dispatch_few.cu",
        "target.of(left.first())", "target.of(0u)", "2 NCCLEP_SIMT_MULTIPROCESSORS=17 test_formats casts"),
    Bug("few rows leave the ids of unused rows", "ll/rank_dispatch_few.cu",
        "    clear_ids(block, topk, 1 + block.params.serve_blocks);\n", "", FEW_BY_RANK),
    Bug("a rank's rows are sent to every second rank", "ll/rank_combine.cu", "number += block.senders();",
        "number += 2 * block.senders();", FEW_BY_RANK),
    Bug("blocks that send also add", "ll/rank_combine.cu", "op.receives() && group.quotient == params.groups - 1;",
        "op.receives();", FEW_BY_RANK),
    # ---- Combine --------------------------------------------------------------------------------
    Bug("weights not waited for", "ll/combine_send.cuh",
        "weight = wait_for_packet_in(op, op.here().entries(outgoing.rank, outgoing.token) + lane_idx(),\n"
        "                                    op.from(outgoing.rank, WAIT_WEIGHT));",
        "weight = {true, __float_as_uint(0.5f)};"),
    Bug("a sum without its weights", "ll/combine_send.cuh",
        "if (all_lanes(has_weight)) {", "{",
        "2 test_ll ll_no_sum_is_sent_without_its_weights"),
    Bug("the first of equal ids means all", "ll/topk_weights.cuh", " || meant != nth) {", ") {",
        "2 test_ll permuted"),
    Bug("a caller's NaN taken for a mask", "ll/topk_weights.cuh",
        "return is_masked(weight) ? __uint_as_float(kMasked ^ 1u) : weight;", "return weight;",
        "2 test_ll weights_follow"),
    Bug("added in the order of the dispatch", "ll/topk_weights.cuh", "            topk.order = k;\n",
        "            topk.order = lane_idx();\n", "2 NCCL_EP_LL_COMBINE=exact test_ll permuted"),
    Bug("ends before all peers have begun", "ll/combine_sums.cuh",
        "            check_fingerprint(block.op, rank);\n", "", DIFFERENT),
    Bug("times of whom nobody waits for", "ht/combine_run.cuh", "return pairs.to_receive[peer] != 0;", "return false;",
        "2 test_ht waits_are"),
    Bug("launched early without waiting for the kernel before", "ll/dispatch.cu",
        "ENTRY(ll_dispatch) {\n    follow_grid();\n", "ENTRY(ll_dispatch) {\n",
        "2 test_ll widths"),
    # ---- Rank-major -----------------------------------------------------------------------------
    Bug("ids of unused rows stay", "ll/rank_receive.cuh", "            store_id(topk, ids + i, kNowhere);\n", "",
        RANK_MAJOR),
    Bug("a token counted for each of its experts", "ll/rank_notices.cuh",
        "match(peer < 0 ? nothing : at.quotient * op.peers() + peer);", "{1u << lane_idx()};", RANK_MAJOR),
    Bug("rows of a source where its tokens are", "ll/rank_receive.cuh",
        "row = block.output.row(source, shuffle(entry.index(), here.first()));",
        "row = block.output.row(source, unit.token);", RANK_MAJOR),
    Bug("weights that have not come", "ll/rank_receive.cuh",
        "return all_lanes(packet_epoch(packet) == op.epoch);", "return true;", RANK_MAJOR),
    Bug("ranks added in their order", "ll/combine_sums.cuh", "        before = which.count_before();\n",
        "        for (LaneMask left = which; left.any(); left.drop_first()) {\n"
        "            before += shuffle(peer, left.first()) < peer ? 1 : 0;\n        }\n",
        "4 NODES=0001 test_ll rank_major_shapes"),
    Bug("ranks of one node added in their order", "ll/rank_combine.cu",
        "progress.left.drop_first()) {\n            Vec16 vec[1] = {own};\n"
        "            progress.peer = static_cast<uint32_t>(shuffle(host, progress.left.first()));",
        "progress.left.drop(progress.left.last())) {\n            Vec16 vec[1] = {own};\n"
        "            progress.peer = static_cast<uint32_t>(shuffle(host, progress.left.last()));",
        "4 test_ll rank_major_shapes"),
    # ---- Views ----------------------------------------------------------------------------------
    Bug("a view is cleaned before anybody has read it", "ll/view_receive.cuh",
        "unit.chunk(block.shape, block.view), vec)) {\n            return;\n        }\n",
        "unit.chunk(block.shape, block.view), vec)) {\n            return;\n        }\n"
        "        const uint32_t number = source * block.shape.max_tokens + unit.row;\n"
        "        uint8_t* at = const_cast<uint8_t*>(block.view.rows + view_row(block.shape, number));\n"
        "        reset_chunk<ChunkData>({at, nullptr}, unit.chunk(block.shape, block.view));\n", VIEWS),
    Bug("a view is not cleaned", "ll/rank_combine.cu", "            clean_row(block, outgoing.row, chunk);\n", "",
        VIEWS),
    Bug("of longer rows of a view a combine cleans a part", "ll/rank_combine.cu",
        "i += block.shape.chunks * block.shape.chunk_bytes) {", "i += bytes) {", VIEW_FORMATS),
    Bug("scales of a view are taken before they have come", "ll/view_rows.cuh",
        "(packet_epoch(packet) == scales_epoch(op) ||", "(true ||", VIEW_FORMATS),
    Bug("each chunk of a view's row has the first one's scales", "ll/view_rows.cuh",
        "lane_idx() * block.shape.chunks + chunk.index)", "lane_idx() * block.shape.chunks)", VIEW_FORMATS),
    Bug("scales of a view from two sources only", "ll/view_receive.cuh",
        "number < block.op.ranks(); number += block.view.warps", "number < 2; number += block.view.warps",
        "3 test_ll views_formats_of_many"),
    Bug("a bank is taken for clean without its rank's word", "ll/view_block.cuh",
        "        return packet_epoch(before) == op.epoch_before && (", "        return true || (",
        "2 test_ll views_in_graphs", beside=(LATE_TO_CLEAN,)),
    Bug("a bank is said to be clean while it is cleaned", "ll/rank_dispatch_view.cu",
        "        if (block.shared.owner[block.view.bank] == 0) {\n            put_value",
        "        if (true) {\n            put_value",
        VIEWS),
    Bug("a bank is said to be clean before all blocks have cleaned", "ll/view_block.cuh",
        "inc_acq_rel_gpu(&view.state->blocks_cleaned, gridDim.x - 1) == gridDim.x - 1;",
        "inc_acq_rel_gpu(&view.state->blocks_cleaned, gridDim.x - 1) == 0;", VIEWS),
    Bug("a bank of views has other lengths before all blocks have begun", "ll/view_receive.cuh",
        "    sync_warp();\n}\n\n// Row `index`",
        "    if (block.is_first() && lane_idx() == 0) {\n"
        "        st_relaxed_gpu(&block.view.state->row_bytes[block.view.bank], block.shape.row_bytes);\n"
        "    }\n    sync_warp();\n}\n\n// Row `index`", "3 test_ll views_beside"),
    Bug("a combine cleans the view of another dispatch", "ll/rank_combine.cu",
        "filled != 0 && owned_by == filled;", "owned_by != 0;", "2 test_ll views_that_are_overtaken"),
    Bug("a dispatch whose rows are copied leaves its handle the bank of the one before", "ll/rank_receive.cuh",
        "        if (threadIdx.x == 0) {", "        if (false) {", "2 test_ll views_beside_copied"),
    Bug("rows of views a row further on, the last in the other bank", "ll/view.cuh", "return row * shape.row_bytes;",
        "return (row + 1) * shape.row_bytes;", VIEWS),
    Bug("no flag for a view's data with the sentinel", "ll/view.cuh", "    if (with_sentinel) {", "    if (false) {",
        VIEWS),
    # ---- Several nodes ---------------------------------------------------------------------------
    Bug("sums of nodes in the order of their numbers", "ll/combine_sums.cuh",
        "op.nodes.returned_message(op.nodes.place_of(nearest))",
        "op.nodes.returned_message(4 - nearest)", OVER_NODES),
    Bug("the own node's sum before all others", "ll/nodes.cuh",
        "own_place() const { return nodes.own_place; }",
        "own_place() const { return nodes.own_place == OWN_NODE_FIRST ? OWN_NODE_FIRST : 0; }",
        "4 NODES=0123 NCCL_EP_NODE_SUMS=invariant test_ll bits_from_any_home"),
    Bug("the own node's sum not rounded", "ht/combine_receive.cuh",
        "if (block.partials.rounds_own_node()) {", "if (false) {",
        "3 NODES=001 NCCL_EP_NODE_SUMS=invariant test_ht uneven_tokens"),
    Bug("the own node's sum at the place of another", "ht/partials.cuh",
        "rounds_own_node() && place == from.own_place", "rounds_own_node() && place == 0",
        "4 NODES=0123 NCCL_EP_NODE_SUMS=invariant test_ht bits_from_any_home"),
    Bug("chunks without the rows before them", "ht/place.cu",
        "entry.index += block.shared.shift", "entry.index += 0 * block.shared.shift", HT_NODES),
    Bug("rows of another operation", "net/message.cuh", " (header.fingerprint ^ ours.fingerprint) |",
        "", "2 NODES=01 test_errors ht_different_calls_over"),
    Bug("an epoch for each stage", "ht/messages.cuh", "if (header.stage == 0) {", "if (true) {",
        HT_NODES_BACKWARD),
    Bug("the mask asked for no rank", "ht/route_ids.cuh", "        if (expert != kNowhere) {", "        if (true) {",
        "2 test_ht routing_styles", beside=(
            Change("peer/peer.cuh", "constexpr bool is_active(const PeerTable&, uint32_t /*rank*/) {",
                   "bool is_active(const PeerTable& peers, uint32_t rank) {\n"
                   "    if (rank >= peers.ranks) __builtin_trap();"),)),
    Bug("rows of the wrong piece", "ht/scope.cuh", "(starts[middle] <= at ? low : high)",
        "(starts[middle] < at ? low : high)", HT_NODES),
    Bug("a stage that begins where the operation does", "ht/scope.cuh",
        "base[peer] -= stage.departures[peer] * common.shape.row_units;", "", HT_NODES),
    Bug("packed rows in the order of the first tokens", "ht/pack.cu",
        "token = list[i];", "token = first + i;", HT_NODES),
    Bug("partial sums of the first stage", "ht/partials.cuh",
        "number = position - before;", "number = position;", HT_NODES),
    Bug("tokens counted from the operation's first", "ht/scope.cuh",
        "origin.index - stage.starts[origin.source * stage.chunk_ends]}", "origin.index}", HT_NODES),
    Bug("tails of the token before", "ht/messages.cuh", "(uint64_t{index} + 1) *", "uint64_t{index} *",
        HT_NODES),
    Bug("sums of nodes in the other order", "ht/partials.cuh",
        "const uint32_t position = from.departing_index[uint64_t{other} * from.tokens + token];",
        "other = from.others - 1 - other;\n"
        "    const uint32_t position = from.departing_index[uint64_t{other} * from.tokens + token];", HT_NODES),
    Bug("gradients at their places on the node", "ht/place.cu",
        "expert_places[written] = node << HT_PLACE_BITS | place;",
        "expert_places[written] = node << HT_PLACE_BITS | written;", HT_NODES_BACKWARD),
    Bug("rows that begin with the source's first chunk", "ht/route_nodes.cuh",
        "handle.source_begins[source], before[0]);", "handle.source_begins[source], 0);", HT_NODES),
    Bug("rows of another source", "ll/nodes.cuh",
        "const uint8_t* rows = body_of(rows_message(number));",
        "const uint8_t* rows = body_of(rows_message(1));", OVER_NODES),
    Bug("a sum for the wrong source", "ll/combine_sums.cuh",
        "block.bank_slots.of_sum(at.number, ", "block.bank_slots.of_sum(0, ", OVER_NODES),
    Bug("packed rows without room for their scales", "ll/pack.cu", "row_format(shape).offset(token);",
        "uint64_t{token} * params.rows.payload_bytes;", "2 NODES=01 test_formats casts_on"),
    Bug("scales of a packed cast counted from the warp's elements", "ht/pack.cu",
        "store_scale(rows, scales, at, stored);", "store_scale(rows, scales, at - first, stored);",
        "2 NODES=01 test_formats all_bfloat16_ht"),
    Bug("other operations of other nodes", "ll/nodes.cuh",
        "const MessageHeader header = i == threadIdx.x ?",
        "return true;\n        const MessageHeader header = i == threadIdx.x ?",
        "2 NODES=01 test_errors over_nodes"),
    # ---- High throughput ------------------------------------------------------------------------
    Bug("of equal ids the last one's weight", "ht/tail.cuh",
        "is_named ? found + other_weight : other_weight;", "other_weight;", "2 test_ht repeated_experts"),
    Bug("notified without a fence", "ht/notify.cuh", "        fence_acq_rel_sys();\n", "", HT),
    Bug("notified before it was copied", "ht/notify.cuh", "        staging_.wait_stored_but_last();\n", "", HT),
    Bug("closed before the last rows were copied", "ht/notify.cuh", "        staging_.wait_stored();\n", "", HT),
    Bug("a queue that overflows", "ht/notify.cuh",
        "        wait_notified(kQueueRows - count);\n", "", HT_MANY, beside=SHORT_QUEUES),
    Bug("sent to a slot that is not free", "ht/credits.cuh",
        "return is_or_follows(static_cast<uint32_t>(credits >> 32), end) &&", "return true ||", HT_MANY),
    Bug("sent to a slot whose first half is not free", "ht/credits.cuh",
        "is_or_follows(static_cast<uint32_t>(credits), end - 1);", "true;", HT_MANY, beside=(LATE_FIRST_ROW,)),
    Bug("of a group of slots only the first is looked at", "ht/credits.cuh",
        "count == i && frees_slot(common, words[i], sequence + i * kSlotUnits)",
        "i > 0 || frees_slot(common, words[0], sequence)", HT_MANY),
    Bug("no credit for the rest of a slot", "ht/rings.cuh",
        "(units.takes_whole_slot(sequence, pairs.received_end[source]))", "(common.shape.row_units == 2)", HT_MANY),
    Bug("scales from a part too far", "ht/scaled_rows.cuh",
        "scales_at() + part * sizeof(Vec16) - offset;", "scales_at() + (part + 1) * sizeof(Vec16) - offset;",
        "2 test_formats forwarded_scales"),
    Bug("cast from the first element on", "ht/cast_rows.cuh",
        "(left - 1) * kOfWarp +", "((elements - 1) / kOfWarp + 1 - left) * kOfWarp +", "2 test_formats casts"),
    Bug("cast rows that nobody keeps", "ht/dispatch_send.cuh", "    if (!local.is_here) {\n",
        "    if (true) {\n", "2 test_formats casts"),
    Bug("other scales than agreed", "ht/scaled_rows.cuh", "if (word == scaled.word) {",
        "if (true) {", "2 test_errors ht_scales_that_differ"),
    Bug("rows of another shape told by their second half", "ht/dispatch_receive.cuh",
        "if (!fits && sequence % kSlotUnits == 0) {", "if (!fits) {", "2 test_errors ht_scales_that_differ"),
    Bug("a row taken before it has come", "ht/dispatch_receive.cuh",
        "is_left && next_[0] < ld_acquire_cta_shared(&block.shared.arrived[source]);", "is_left;", HT),
    Bug("gradients read behind the last column", "ht/combine_receive.cuh",
        "const uint32_t count = min(entries.experts_from(lane), columns);",
        "const uint32_t count = entries.experts_from(lane);", "2 test_ht gradients_with"),
    Bug("overwritten while it is being copied", "ht/staging.cuh",
        "            bulk_store_wait_read();\n", "", HT),
    Bug("parity of a staging buffer", "ht/staging.cuh", "        parity_ ^= 1;\n", "", HT),
    Bug("bytes of a tail not expected", "ht/staging.cuh",
        "mbarrier_arrive_expect(barrier_, bytes + tail_bytes)",
        "mbarrier_arrive_expect(barrier_, bytes)", HT),
    Bug("a refusal that is not told", "ht/route.cu", "make_packet(epoch, block.params.verdict)",
        "make_packet(epoch, block.params.handle.top_k)", REFUSAL),
    Bug("a verdict before all have told", "ht/route.cu",
        "verdict.data}));\n    }\n    __syncthreads();", "verdict.data}));\n    }", REFUSAL),
    Bug("an operation on a handle that a rank refused", "ht/rings.cuh",
        "    if ((pairs.total & HT_DISAGREED) != 0) {", "    if (false) {",
        "2 test_errors ht_handle_used_before"),
    Bug("an operation behind a failure", "ht/rings.cuh",
        "    if (pairs.failure != 0) {", "    if (false) {", "2 test_ht behind_a_failure"),
    Bug("a failure that only its own rank minds", "peer/fault.cuh",
        "own != 0 ? kOwnFailure : peer;", "own != 0 ? kOwnFailure : 0;",
        "2 test_ht behind_a_failure"),
    Bug("an output without rows taken for none", "ht/dispatch_run.cuh",
        "        if (!rows_fit) {", "        if (params.out != nullptr && !rows_fit) {",
        "2 test_ht outputs_without_rows"),
    Bug("sums before all rows have come", "ht/combine_receive.cuh",
        "    if (rank_row.is_remote) {\n        const uint32_t rank",
        "    if (false) {\n        const uint32_t rank", HT),
    Bug("sequences advanced by a block that is not the last", "ht/rings.cuh",
        "    __syncthreads();\n    if (pairs.failure != 0) {", "    if (pairs.failure != 0) {", HT),
    Bug("a combine that takes any header", "handle_header.cu", "ballot(got != expected)", "ballot(false)",
        "2 test_second without_a_dispatch"),
    Bug("an operation that takes any header", "ht/scope.cuh", "nccl_ep::known_failure(common);",
        "nccl_ep::known_failure(common.wait);", "2 test_second other_tokens"),
    Bug("a header before all of an update", "ht/caller_block.cuh", "(finish.ended, gridDim.x - 1) == gridDim.x - 1",
        "(finish.ended, gridDim.x - 1) == 0", "2 test_second memory"),
    Bug("totals that a dispatch replaces", "add_counts.cu", "atomicAdd(total, ", "*total = (",
        "2 test_ll rows_are_counted"),
    # ---- What a peer tells ----------------------------------------------------------------------
    Bug("more tokens than a rank may have", "ll/dispatch_notices.cuh",
        "min(data, block.shape.max_tokens)", "data", LL_MOST, lie=MANY_TOKENS),
    Bug("experts that are not there", "ll/dispatch_receive.cuh",
        "if (received.entry.expert() >= block.shape.local_experts) {", "if (false) {", LL_MOST,
        lie=STRAY_EXPERTS),
    Bug("more rows than a rank may have", "ht/route.cu",
        "shared.rows[source] = block.bounded(rows.data);", "shared.rows[source] = rows.data;",
        HT_MOST, lie=MANY_ROWS),
    Bug("more rows for an expert than a rank may have", "ht/route.cu",
        "atomicAdd(&totals[at.remainder], block.bounded(rows.data));",
        "atomicAdd(&totals[at.remainder], rows.data);", HT_MOST, lie=MANY_FOR_EXPERTS),
    Bug("what a rank tells itself in its window", "ht/route.cu",
        "return rank == params.peers.rank;", "return false;", HT_MOST, lie=FOR_ITSELF),
    Bug("ids of experts that are not there", "ht/tail.cuh",
        "        id = static_cast<uint32_t>(id) < common.layout.local_experts ? id : -1;\n", "",
        "2 test_ht ids_in_range", lie=STRAY_IDS),
    *BUGS_OF_ROUTES,
)
