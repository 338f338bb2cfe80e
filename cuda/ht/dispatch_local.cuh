// The receivers' local work, without peers: rows of this rank's tokens for its own experts, unless senders store them,
// and output rows that no token fills.
#pragma once

#include "dispatch_block.cuh"

namespace nccl_ep::ht_dispatch_impl {

// A token of this rank, from which `finish` makes the image.
template <typename Block>
struct LocalToken {
    uint32_t token;
    typename Block::TokenLocation location;
    typename Block::Prefetched prefetched;
};

// One warp copies a token to its row of this rank's output; false if the token does not go there.
template <typename Block>
__device__ bool copy_local_token(const Block& block, uint32_t token, Staging& staging) {
    const auto& rows = block.rows;
    const TokenEntries entries(block.common, token);
    const LocalRow local(block, entries);
    if (!local.is_here) {
        return false;
    }
    const uint32_t row = local.row(block);
    const typename Block::TokenLocation location = block.scope.location(block.common, token);
    const LocalToken<Block> source = {token, location, rows.prefetch(block, token, location)};
    for (uint32_t offset = 0; block.wants_images && offset < rows.span(block.common);
         offset += rows.step(block.common)) {
        staging.wait_reusable();
        rows.load(block, block.row_of_token(token, location), offset, staging);
        const uint8_t* chunk = rows.finish(block, source, offset, staging);
        rows.deliver(block, row, offset, rows.bytes_at(block.common, offset), chunk, staging);
        staging.commit();
    }
    if (block.scope.has_routing(block.params)) {
        local.write_routing(block, entries, weight_of_lane(block, entries, block.caller_routing(token, location)));
    }
    sync_warp();
    return true;
}

// One warp fills row `number`, which no token fills, of each output, of rows and scales only if `fills_rest`; false if
// no output has that row.
template <typename Block>
__device__ bool fill_unused_row(const Block& block, uint64_t number, Staging& staging) {
    const bool fills = block.params.fills_rest != 0;
    const bool has_row = any_lane(fills && block.wants_rows && number < block.params.out_rows);
    const bool has_routing = any_lane(block.wants_routing && number < block.params.routing_rows);
    const uint32_t row = static_cast<uint32_t>(number);
    if (has_row) {
        const uint32_t row_bytes = block.rows.payload_bytes(block.common);
        for (uint32_t offset = 0; offset < row_bytes; offset += HT_ZERO_BYTES) {
            staging.store_shared(block.zeros, block.out_row(row) + offset,
                                 min(row_bytes - offset, HT_ZERO_BYTES));
        }
        staging.commit();
    }
    if (has_routing) {
        write_routing(block, row, {-1, 0.0f});
    }
    sync_warp();
    const bool has_scales = fills && block.rows.clear_scales(number);
    return has_row || has_routing || has_scales;
}

// One warp does the block's next unit of local work; false if there is none left.
template <typename Block>
__device__ bool work_locally(const Block& block, Staging& staging) {
    SharedStorage& shared = block.shared;
    const uint32_t tokens = block.common.handle.tokens;
    while (!Block::kSenderStoresLocal) {
        const uint32_t token = block.receivers.next_unit(&shared.next_own);
        if (any_lane(token >= tokens)) {
            break;
        }
        if (copy_local_token(block, token, staging)) {
            return true;
        }
    }
    if (!block.scope.is_own()) {
        return false;
    }
    const BlockRange own_turns = {blockIdx.x, 1};
    const uint64_t turn = own_turns.next_unit(&shared.next_unused);
    const uint64_t unused = turn * block.receivers.blocks + block.receivers.index();
    if constexpr (Block::kZones) {
        return block.rows.fill(block, unused, staging);
    }
    return fill_unused_row(block, Block::Layout::unused_row(shared.pairs.total, unused), staging);
}

}  // namespace nccl_ep::ht_dispatch_impl
