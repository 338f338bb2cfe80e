// Tests, when a group opens, that the ranks reach each other's windows, and that a flag arrives after the data that it
// announces.
//
// Grid: one block per rank, SELFTEST_THREADS threads. Block p of rank r writes a pattern into slot r of rank p's window
// and then raises flag r there; it waits for flag p of its own window and compares slot p with what rank p must have
// written. A block writes before it waits, so the blocks of one rank need not run at the same time. The result for each
// peer goes to `results`, in mapped host memory.

#include "base/entry.cuh"
#include "peer/wait.cuh"

namespace nccl_ep::peer_selftest_impl {

// A value that differs for every sender, receiver, run and word.
__device__ uint32_t pattern(uint32_t from, uint32_t to, uint32_t epoch, uint32_t word) {
    const uint32_t pair = from * static_cast<uint32_t>(MAX_PEERS) + to;
    uint32_t mixed = pair * 0x9e3779b1u + epoch;
    mixed = (mixed ^ (mixed >> 15)) * 0x85ebca77u + word;
    return (mixed ^ (mixed >> 13)) * 0xc2b2ae3du;
}

// The flag and the slot of `writer` in a window.
template <template <typename> class Address>
struct Mailbox {
    Address<uint32_t> flag;
    Address<uint32_t> slot;

    __device__ Mailbox(const PeerSelftestParams& params, Address<uint8_t> window, uint32_t writer)
        : flag(as<uint32_t>(window + params.flags_offset) + writer),
          slot(as<uint32_t>(window + params.slots_offset +
                            uint64_t{writer} * SELFTEST_SLOT_BYTES)) {}
};

constexpr uint32_t kSlotWords = SELFTEST_SLOT_BYTES / sizeof(uint32_t);

// All threads write, then one signals: the barrier orders their stores before its release.
__device__ void send(const PeerSelftestParams& params, uint32_t peer) {
    const uint32_t rank = params.peers.rank;
    const Mailbox<Remote> there(params, window_of(params.peers, peer), rank);
    for (uint32_t word = threadIdx.x; word < kSlotWords; word += blockDim.x) {
        put_value(there.slot + word, pattern(rank, peer, params.epoch, word));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        signal(there.flag, params.epoch);
    }
}

// One thread acquires, then all read: the barrier orders its acquire before their loads.
__device__ SelftestResult receive(const PeerSelftestParams& params, uint32_t peer) {
    const uint32_t rank = params.peers.rank;
    const Mailbox<Own> here(params, own_window(params.peers), peer);
    bool arrived = true;
    if (threadIdx.x == 0) {
        arrived = wait_for_flag(params, here.flag, {WAIT_PATTERN, peer, params.epoch});
    }
    if (!__syncthreads_and(arrived)) {
        return {SELFTEST_TIMEOUT, 0};
    }
    bool wrong = false;
    for (uint32_t word = threadIdx.x; word < kSlotWords; word += blockDim.x) {
        wrong |= here.slot[word] != pattern(peer, rank, params.epoch, word);
    }
    const uint32_t wrong_threads = __syncthreads_count(wrong);
    return {wrong_threads == 0 ? SELFTEST_PASSED : SELFTEST_MISMATCH, wrong_threads};
}

ENTRY(peer_selftest) {
    const uint32_t peer = blockIdx.x;
    send(params, peer);
    const SelftestResult result = receive(params, peer);
    if (threadIdx.x == 0) {
        params.results[peer] = result;
    }
}

}  // namespace nccl_ep::peer_selftest_impl
