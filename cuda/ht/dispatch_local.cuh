// What receivers do on this rank alone: rows of own tokens for own experts, unless their senders keep them, and rows
// of outputs that no token fills.
#pragma once

#include "dispatch_block.cuh"

namespace nccl_ep::ht_dispatch_impl {

// What a token's image is made of.
template <typename Block>
struct KeptToken {
    uint32_t token;
    typename Block::Place place;
    typename Block::Ahead ahead;
};

// One warp copies a token to its row of this rank's own output; false if it does not go there.
template <typename Block>
__device__ bool keep_token(const Block& block, uint32_t token, Staging& staging) {
    const auto& rows = block.rows;
    const TokenEntries entries(block.common, token);
    const KeptRow kept(block, entries);
    if (!kept.is_here) {
        return false;
    }
    const uint32_t row = kept.row(block);
    const typename Block::Place place = block.scope.place(block.common, token);
    const KeptToken<Block> source = {token, place, rows.look_ahead(block, token, place)};
    for (uint32_t offset = 0; block.keeps_images && offset < rows.span(block.common);
         offset += rows.step(block.common)) {
        staging.wait_reusable();
        rows.load(block, block.row_of_token(token, place), offset, staging);
        const uint8_t* chunk = rows.finish(block, source, offset, staging);
        rows.deliver(block, row, offset, rows.bytes_at(block.common, offset), chunk, staging);
        staging.commit();
    }
    if (block.scope.has_routing(block.params)) {
        kept.write_routing(block, entries, weight_of_lane(block, entries, block.given_routing(token, place)));
    }
    sync_warp();
    return true;
}

// One warp fills a row of each output that no token fills, of rows and scales only if that is wanted; false if there is
// none.
template <typename Block>
__device__ bool fill_unused_row(const Block& block, uint64_t number, Staging& staging) {
    const bool fills = block.params.fills_rest != 0;
    const bool has_row = any_lane(fills && block.keeps_rows && number < block.params.out_rows);
    const bool has_routing = any_lane(block.keeps_routing && number < block.params.routing_rows);
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
    while (!Block::kKeptBySender) {
        const uint32_t token = block.receivers.next_unit(&shared.next_own);
        if (any_lane(token >= tokens)) {
            break;
        }
        if (keep_token(block, token, staging)) {
            return true;
        }
    }
    if (!block.scope.is_own()) {
        return false;
    }
    const Share own_turns = {blockIdx.x, 1};
    const uint64_t turn = own_turns.next_unit(&shared.next_unused);
    const uint64_t unused = turn * block.receivers.blocks + block.receivers.index();
    if constexpr (Block::kZones) {
        return block.rows.fill(block, unused, staging);
    }
    return fill_unused_row(block, Block::Layout::unused_row(shared.pairs.total, unused), staging);
}

}  // namespace nccl_ep::ht_dispatch_impl
