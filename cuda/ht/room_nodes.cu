// Over several nodes, where ranks drop the rows that they have no room for: finds how many of this rank's rows each
// rank keeps. Runs after ht_route_nodes, which has counted the rows that come to this rank, and after the messages in
// which the remote ranks that it forwards for have sent their counts.
//
// Grid: one block. It tells each rank of the node how many of its rows stay at each rank that this one forwards for,
// and whether that one drops any, and hears the same of all ranks of the group, each from its forwarder here. The host
// takes out what does not stay and, if any rank drops some, lets all ranks route again.
//
// Packets have the epoch of ht_route_nodes and lie where ht_zones has its own: zones.cu says why nobody reads there any
// more. After a failure nobody sends.

#include "../base/entry.cuh"
#include "params/ht_nodes.h"
#include "zones.cuh"

namespace nccl_ep::ht_room_nodes_impl {

struct Block {
    const HtRoomNodesParams& params;

    __device__ const HtNodes& nodes() const { return params.nodes; }
    // Rows that come to forwarded rank `number` from `rank`.
    __device__ uint32_t rows(uint32_t number, uint32_t rank) const {
        const uint32_t ends = nodes().chunks + 1;
        const uint32_t* of = number == 0 ? params.received_rows
                                         : params.arrived + uint64_t{number - 1} * nodes().ranks * ends;
        return of[rank * ends + nodes().chunks];
    }
    // What is told to this rank, or to a peer, about the room of each rank of the group.
    template <template <typename> class Address>
    __device__ Address<uint64_t> packets(Address<uint8_t> window) const {
        return packets_of<Address>(params.packets, params.epoch, window);
    }
};

// One thread tells of the room of forwarded rank `number`.
__device__ void tell_room(const Block& block, uint32_t number) {
    const HtRoomNodesParams& params = block.params;
    const uint32_t ranks = block.nodes().ranks;
    const uint32_t rank = block.nodes().forwarded_by[params.peers.rank * (1 + block.nodes().width) + number];
    uint32_t all = 0;
#pragma unroll 1
    for (uint32_t source = 0; source < ranks; ++source) {
        all += block.rows(number, source);
    }
    const uint32_t drops = all > params.limit ? HT_ROOM_DROPS : 0;
    uint32_t begin = 0;
#pragma unroll 1
    for (uint32_t source = 0; source < ranks; ++source) {
        const uint32_t end = begin + block.rows(number, source);
        const uint32_t stay = min(end, params.limit) - min(begin, params.limit);
        const int32_t peer = block.nodes().of_rank[source].peer;
        if (peer >= 0 && is_active(params.peers, peer)) {
            put_value(block.packets(window_of(params.peers, peer)) + rank, make_packet(params.epoch, drops | stay));
        }
        begin = end;
    }
}

ENTRY(ht_room_nodes) {
    const Block block = {params};
    const uint32_t tellers = known_failure(params.wait) == 0 ? params.nodes.forwarded : 0;
    for (uint32_t number = threadIdx.x; number < tellers; number += HT_ROOM_THREADS) {
        tell_room(block, number);
    }
    __syncthreads();
    for (uint32_t rank = threadIdx.x; rank < params.nodes.ranks; rank += HT_ROOM_THREADS) {
        const uint32_t forwarder = params.nodes.of_rank[rank].forwarder;
        if (!is_active(params.peers, forwarder)) {
            continue;
        }
        const Arrival arrival = wait_for_packet(params, block.packets<Own>(own_window(params.peers)) + rank,
                                                {WAIT_COUNTS, forwarder, params.epoch});
        if (arrival.ok) {
            st_release_sys(reinterpret_cast<uint64_t*>(params.told + rank), make_packet(params.epoch, arrival.data));
        }
    }
}

}  // namespace nccl_ep::ht_room_nodes_impl
