// Finds how many of this rank's rows each rank keeps, over several nodes, where ranks drop the rows that they have no
// room for. Runs after ht_route_nodes, which has counted the rows that come to this rank, and after the messages in
// which its remote sources have sent their counts.
//
// Grid: one block. It notifies each rank of the node of how many of its rows each forwarded rank keeps, and whether
// that rank drops any; and it receives the same about all ranks of the group, each from its forwarder here. The host
// removes the dropped rows from its ids and, if any rank drops some, all ranks route again.
//
// Packets have the epoch of ht_route_nodes and are where ht_zones has its own: zones.cu says why nobody reads there any
// more. After a failure nobody sends.

#include "../base/entry.cuh"
#include "params/ht_nodes.h"
#include "zones.cuh"

namespace nccl_ep::ht_room_nodes_impl {

struct Block {
    const HtRoomNodesParams& params;

    __device__ const HtNodes& nodes() const { return params.nodes; }
    // How many rows come to forwarded rank `number` from `rank`.
    __device__ uint32_t rows(uint32_t number, uint32_t rank) const {
        const uint32_t ends = nodes().chunks + 1;
        const uint32_t* of = number == 0 ? params.received_rows
                                         : params.arrived + uint64_t{number - 1} * nodes().ranks * ends;
        return of[rank * ends + nodes().chunks];
    }
    // The packets about each rank of the group, in the window that begins at `window`.
    template <template <typename> class Address>
    __device__ Address<uint64_t> packets(Address<uint8_t> window) const {
        return packets_of<Address>(params.packets, params.epoch, window);
    }
};

// One thread notifies the ranks of this node of how many of their rows forwarded rank `number` keeps.
__device__ void send_room(const Block& block, uint32_t number) {
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
    const uint32_t forwarded = known_failure(params.wait) == 0 ? params.nodes.forwarded : 0;
    for (uint32_t number = threadIdx.x; number < forwarded; number += HT_ROOM_THREADS) {
        send_room(block, number);
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
            st_release_sys(reinterpret_cast<uint64_t*>(params.kept + rank), make_packet(params.epoch, arrival.data));
        }
    }
}

}  // namespace nccl_ep::ht_room_nodes_impl
