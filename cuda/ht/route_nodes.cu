// Creates a high-throughput handle in a group over several nodes: finds, from the ids of all ranks that this one
// forwards for (its *sources*), where their rows go on this node and where they arrive.
//
// Grid: a block for each source, this rank first; a block for each other node; a block that receives. A source's block
// selects the tokens that have an expert on this node, numbers them and their rows, and notifies every rank of the node
// of how many of these rows it gets, by chunk and by expert. The source itself selects the same tokens from the same
// ids: its block for this node lists them, so that only they travel. The last block waits for the notifications about
// all ranks of the group, each of which comes from the rank's forwarder here, and stores where the rows of each begin:
// ordered by the source's rank in the group, then by token.
//
// Notifications are packets in two banks, for which the proofs of route.cu hold: a kernel ends only after it has those
// of all ranks of its node. Numbers that peers send are bounded here. A source sends only ids over the network; ids
// that name no expert are skipped.

#include "../base/entry.cuh"
#include "numbering.cuh"
#include "route_nodes.cuh"

namespace nccl_ep::ht_route_nodes_impl {

// Counts the tokens for which `travels(token)` holds. All threads call it, behind a barrier; another one is at its end.
template <typename Travels>
__device__ void count_travelling(const Block& block, uint32_t tokens, Travels travels) {
    uint32_t count = 0;
    for (uint32_t token = threadIdx.x; token < tokens; token += HT_ROUTE_THREADS) {
        count += travels(token) ? 1 : 0;
    }
    atomicAdd(&block.shared.travelling, count);
    __syncthreads();
}

// Goes through the tokens of a source chunk by chunk, in tiles: calls `begin_chunk(chunk)`, also for the number after
// the last chunk, and `tile(token, last)` with this thread's token, which exists if it is below `last`.
template <typename BeginChunk, typename Tile>
__device__ __forceinline__ void for_each_tile(const Block& block, uint32_t tokens,
                                              BeginChunk begin_chunk, Tile tile) {
    const uint32_t chunks = block.nodes().chunks;
    for (uint32_t chunk = 0; chunk <= chunks; ++chunk) {
        begin_chunk(chunk);
        __syncthreads();
        const uint32_t last = chunk < chunks ? chunk_begin(tokens, chunk + 1, chunks) : 0;
        for (uint32_t first = chunk_begin(tokens, chunk, chunks); first < last;
             first += HT_ROUTE_THREADS) {
            tile(first + threadIdx.x, last);
        }
    }
}

// ---- A source ----------------------------------------------------------------------------------

__device__ bool comes_here(const Block& block, const HtForwarded& source, uint32_t token) {
    bool comes = false;
    for (uint32_t k = 0; k < block.top_k(); ++k) {
        comes = comes || block.expert_here(source, token, k) >= 0;
    }
    return comes;
}

// One thread appends the experts of `token` on local rank `local`, ascending, to the `written` entries; returns how
// many entries there are then.
__device__ uint32_t write_entries(const Block& block, const HtForwarded& source, uint32_t token,
                                  uint32_t local, uint32_t index, HtEntry* entries,
                                  uint32_t written) {
    const int32_t end = static_cast<int32_t>((local + 1) * block.local_experts());
    int32_t last = static_cast<int32_t>(local * block.local_experts()) - 1;
    for (;;) {
        int32_t next = end;
        for (uint32_t k = 0; k < block.top_k(); ++k) {
            const int32_t expert = block.expert_here(source, token, k);
            next = expert > last && expert < next ? expert : next;
        }
        if (next == end) {
            return written;
        }
        entries[written++] = {next, index};
        last = next;
    }
}

// One thread adds the experts of its token to the tally.
__device__ void tally_token(const HtEntry* entries, uint32_t written, uint32_t* tally) {
    for (uint32_t i = 0; i < written; ++i) {
        atomicAdd(tally + entries[i].expert, 1u);
    }
}

// Numbers the tokens that come here, and their rows to each local rank.
__device__ void number_source(const Block& block, uint32_t number, const HtForwarded& source,
                              bool all_come, uint32_t* tally) {
    const HtNodesMemory& handle = block.params.handle;
    Numbering& numbering = block.shared.numbering;
    const uint32_t locals = block.local_ranks();
    HtEntry* all = number == 0 ? handle.own_entries
                               : handle.raw_entries + uint64_t{source.first} * block.top_k();
    const auto begin_chunk = [&](uint32_t chunk) {
        const uint64_t at = uint64_t{number} * block.chunk_ends() + chunk;
        for (uint32_t local = threadIdx.x; local < locals; local += HT_ROUTE_THREADS) {
            handle.source_rows[at * locals + local] = numbering.before[local];
        }
        if (threadIdx.x == 0) {
            handle.starts[at] = numbering.before[locals];
        }
    };
    for_each_tile(block, source.tokens, begin_chunk, [&](uint32_t token, uint32_t last) {
        ColumnMask mask;
        for (uint32_t k = 0; token < last && k < block.top_k(); ++k) {
            const int32_t expert = block.expert_here(source, token, k);
            if (expert >= 0) {
                mask.set(expert / block.local_experts());
            }
        }
        const bool comes = token < last && (all_come || mask.has_any());
        if (comes) {
            mask.set(locals);
        }
        // The last column, after the local ranks, gives the token's own number.
        uint32_t index[HT_MAX_TOP_K];
        uint32_t local[HT_MAX_TOP_K];
        uint32_t rows = 0;
        number_tile(numbering, locals + 1, mask, [&](uint32_t column, uint32_t before) {
            if (column < locals) {
                local[rows] = column;
                index[rows++] = before;
                return;
            }
            HtEntry* entries = all + uint64_t{before} * block.top_k();
            uint32_t written = 0;
            for (uint32_t i = 0; i < rows; ++i) {
                written = write_entries(block, source, token, local[i], index[i], entries, written);
            }
            tally_token(entries, written, tally);
            for (; written < block.top_k(); ++written) {
                entries[written] = {-1, 0};
            }
        });
    });
    __syncthreads();
}

// Notifies the ranks of this node of what they get from a source, and resets the tally.
__device__ void notify(const Block& block, uint32_t number, const HtForwarded& source,
                       uint32_t* tally) {
    const uint32_t epoch = block.params.epoch;
    const uint32_t local_experts = block.local_experts();
    const uint32_t locals = block.local_ranks();
    const uint32_t chunks = block.nodes().chunks;
    for (uint32_t i = threadIdx.x; i < block.experts_of_node(); i += HT_ROUTE_THREADS) {
        if (is_active(block.params.peers, i / local_experts)) {
            put_value(block.counts_for(i / local_experts, source.rank) + i % local_experts,
                      make_packet(epoch, ld_relaxed_gpu(tally + i)));
        }
        st_relaxed_gpu(tally + i, 0);
    }
    const uint32_t* before =
        block.params.handle.source_rows + uint64_t{number} * block.chunk_ends() * locals;
    for (uint32_t i = threadIdx.x; i < locals * chunks; i += HT_ROUTE_THREADS) {
        const uint32_t peer = i % locals;
        const uint32_t rows = before[i + locals] - before[i];
        if (is_active(block.params.peers, peer)) {
            put_value(block.counts_for(peer, source.rank) + local_experts + i / locals,
                      make_packet(epoch, rows));
        }
    }
    for (uint32_t peer = threadIdx.x; peer < locals; peer += HT_ROUTE_THREADS) {
        if (is_active(block.params.peers, peer)) {
            const Remote<uint64_t> counts =
                block.counts_for(peer, source.rank) + local_experts + chunks;
            put_value(counts, make_packet(epoch, source.verdict));
            put_value(counts + 1, make_packet(epoch, source.tokens));
        }
    }
}

__device__ void route_source(const Block& block, uint32_t number) {
    const HtForwarded source = block.params.forwarded[number];
    uint32_t* tally = block.params.tally + uint64_t{number} * block.experts_of_node();
    if (threadIdx.x == 0) {
        block.params.handle.firsts[number] = source.first;
    }
    if (number != 0) {
        count_travelling(block, source.tokens,
                         [&](uint32_t token) { return comes_here(block, source, token); });
    }
    const bool all_come = number == 0 || all_travel(block.shared.travelling, source.tokens);
    number_source(block, number, source, all_come, tally);
    // After a failure nobody is notified, and waits are given up.
    if (block.shared.failure == 0) {
        notify(block, number, source, tally);
    }
    const uint32_t* starts = block.params.handle.starts + number * block.chunk_ends();
    const uint32_t first = (block.nodes().others + number) * block.chunk_ends();
    for (uint32_t i = threadIdx.x; i < block.chunk_ends(); i += HT_ROUTE_THREADS) {
        block.announce(first + i, starts[i]);
    }
}

// ---- Another node ------------------------------------------------------------------------------

// Lists this rank's tokens that go to another node.
__device__ void list_departing(const Block& block, uint32_t other) {
    const HtNodesMemory& handle = block.params.handle;
    const HtForwarded source = block.params.forwarded[0];
    Numbering& numbering = block.shared.numbering;
    const auto goes = [&](uint32_t token) {
        bool goes = false;
        for (uint32_t k = 0; k < block.top_k(); ++k) {
            const int32_t expert = block.expert(source, token, k);
            goes = goes || (expert != kNowhere && block.host_of(expert).distance == 1 + other);
        }
        return goes;
    };
    count_travelling(block, source.tokens, goes);
    const bool all_go = all_travel(block.shared.travelling, source.tokens);
    uint32_t* list = handle.departing_tokens + uint64_t{other} * source.tokens;
    uint32_t* departing_index = handle.departing_index + uint64_t{other} * source.tokens;
    const auto begin_chunk = [&](uint32_t chunk) {
        if (threadIdx.x == 0) {
            const uint32_t at = other * block.chunk_ends() + chunk;
            handle.departing[at] = numbering.before[0];
            block.announce(at, numbering.before[0]);
        }
    };
    for_each_tile(block, source.tokens, begin_chunk, [&](uint32_t token, uint32_t last) {
        ColumnMask mask;
        const bool has_row = token < last && goes(token);
        if (has_row || (token < last && all_go)) {
            mask.set(0);
        }
        if (token < last) {
            departing_index[token] = HT_NONE;
        }
        number_tile(numbering, 1, mask, [&](uint32_t, uint32_t before) {
            list[before] = token;
            if (has_row) {
                departing_index[token] = before;
            }
        });
    });
}

// ---- The kernel --------------------------------------------------------------------------------

template <typename Layout>
__device__ void run(const HtRouteNodesParams& params) {
    __shared__ SharedStorage shared;
    const Block block = {params, shared};
    clear_numbering(shared.numbering);
    if (threadIdx.x == 0) {
        shared.travelling = 0;
        shared.failure = known_failure(params.wait);
        shared.conclusion = kAgreed;
        shared.most_tokens = 0;
    }
    __syncthreads();
    const uint32_t forwarded = params.nodes.forwarded;
    if (blockIdx.x < forwarded) {
        route_source(block, blockIdx.x);
    } else if (blockIdx.x < forwarded + params.nodes.others) {
        list_departing(block, blockIdx.x - forwarded);
    } else {
        receive<Layout>(block);
    }
}

ENTRY(ht_route_nodes) { run<Flat>(params); }

}  // namespace nccl_ep::ht_route_nodes_impl
