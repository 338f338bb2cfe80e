// The network between nodes, as kernels see it: messages, each with a header that says to what it belongs. A kernel
// packs and sends one; on the receiver's node another kernel relays it to the peers, once it has arrived.
//
// Kernels are templates over a network's type, `Net`, which has
//     send     one thread: the message behind this header is packed
//     arrived  one thread, before it uses a message: whether it is of the operation; if not, that is reported
// No sender has to be told that a message was read: the hosts enqueue the next receive there behind its readers.
#pragma once

#include "../peer/fault.cuh"

namespace nccl_ep {

// A message that begins with its header, and what follows that.
__device__ __forceinline__ const MessageHeader& header_of(const uint8_t* message) {
    return *reinterpret_cast<const MessageHeader*>(message);
}
template <typename Byte>
__device__ __forceinline__ Byte* body_of(Byte* message) {
    return message + sizeof(MessageHeader);
}

// How a kernel reports a failure and tells all peers, if it has no way of its own.
struct ReportsApart {
    template <typename Common>
    __device__ __forceinline__ static void report(const Common& common, uint32_t fault, const Awaited& awaited,
                                                  Reported ours, Reported theirs) {
        if (report_failure(common.wait, fault, awaited, ours, theirs)) {
            broadcast_failure(common.peers, common.wait);
        }
    }
};

// Reports that a message is of another operation than `ours`. Not inlined, as that seldom happens.
template <typename Reports, typename Common>
__device__ __noinline__ bool refuse_message(const Common& common, const MessageHeader header, const MessageHeader ours,
                                            const Awaited awaited, uint32_t rank) {
    uint32_t fault = FAULT_RAIL_PEER_FAILED;
    uint32_t expected = awaited.epoch;
    uint32_t got = rank;
    if (header.channel != ours.channel) {
        fault = FAULT_STAGED_DIFFERS;
    } else if (header.epoch != ours.epoch || header.stage != ours.stage) {
        // What lay there before: the exchange was ended.
    } else if (header.fingerprint != ours.fingerprint || header.scales_word != ours.scales_word) {
        fault = FAULT_DIFFERS;
        expected = ours.fingerprint;
        got = header.fingerprint;
    } else if (header.handle != ours.handle) {
        fault = FAULT_HANDLE_DIFFERS;
        expected = ours.handle;
        got = header.handle;
    }
    Reports::report(common, fault, awaited, {expected, ours.scales_word}, {got, header.scales_word});
    return false;
}

// On one node there is none.
struct NoNet {};

// The hosts enqueue sends and receives between kernels (src/backend/net/two_sided). So a message has come when the
// kernel begins; unless the exchange was ended, which leaves what lay there before, of an earlier epoch.
struct TwoSided {
    // The host has it sent after the kernel.
    __device__ static void send(uint8_t* message, const MessageHeader& header) {
        *reinterpret_cast<MessageHeader*>(message) = header;
    }

    // `rank` has sent it; reports name it as `awaited.peer`. One of another operation may have the right size, too.
    template <typename Reports = ReportsApart, typename Common>
    __device__ static bool arrived(const Common& common, const MessageHeader& header, const MessageHeader& ours,
                                   const Awaited& awaited, uint32_t rank) {
        const uint32_t differs = (header.channel ^ ours.channel) | (header.epoch ^ ours.epoch) |
                                 (header.stage ^ ours.stage) | (header.fingerprint ^ ours.fingerprint) |
                                 (header.scales_word ^ ours.scales_word) | (header.handle ^ ours.handle);
        return (differs | header.failed) == 0 || refuse_message<Reports>(common, header, ours, awaited, rank);
    }
};

// Whether `arrived(i)` for each of `count` messages. All threads of a block call it.
template <typename Arrived>
__device__ __forceinline__ bool all_arrived(uint32_t count, Arrived arrived) {
    bool all = true;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
        all = arrived(i) && all;
    }
    return __syncthreads_and(all ? 1 : 0) != 0;
}

}  // namespace nccl_ep
