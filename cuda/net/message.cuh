// The network between nodes, as kernels see it: messages, each with a header that names its operation. One kernel packs
// and sends a message; on the receiving node another kernel forwards its rows to the peers.
//
// Kernels are templates over a network's type, `Net`, which has
//     send     one thread calls it: the message behind this header is packed
//     arrived  one thread calls it before it uses a message: whether the message belongs to the operation; if not, it
//              reports that
// Messages need no acknowledgement: the host enqueues the next receive into a buffer behind the kernels that read it.
#pragma once

#include "../peer/fault.cuh"

namespace nccl_ep {

// The header at the beginning of a message, and what follows it.
__device__ __forceinline__ const MessageHeader& header_of(const uint8_t* message) {
    return *reinterpret_cast<const MessageHeader*>(message);
}
template <typename Byte>
__device__ __forceinline__ Byte* body_of(Byte* message) {
    return message + sizeof(MessageHeader);
}

// How kernels report a failure to the host and to all peers, unless they have a function of their own for that.
struct DefaultReports {
    template <typename Common>
    __device__ __forceinline__ static void report(const Common& common, uint32_t fault, const Awaited& awaited,
                                                  ReportedValue ours, ReportedValue theirs) {
        if (report_failure(common.wait, fault, awaited, ours, theirs)) {
            broadcast_failure(common.peers, common.wait);
        }
    }
};

// Reports that a message belongs to another operation than `ours`. Not inlined, as it seldom runs.
template <typename Reports, typename Common>
__device__ __noinline__ bool refuse_message(const Common& common, const MessageHeader header, const MessageHeader ours,
                                            const Awaited awaited, uint32_t rank) {
    uint32_t fault = FAULT_RAIL_PEER_FAILED;
    uint32_t expected = awaited.epoch;
    uint32_t got = rank;
    if (header.channel != ours.channel) {
        fault = FAULT_STAGED_DIFFERS;
    } else if (header.epoch != ours.epoch || header.stage != ours.stage) {
        // The exchange was aborted, and the buffer still has an earlier message.
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

// For groups on one node.
struct NoNet {};

// The hosts enqueue sends and receives between kernels (src/backend/net/two_sided). So a message has arrived when the
// kernel begins, unless the exchange was aborted; then the buffer has a message of an earlier epoch.
struct TwoSided {
    // The host has enqueued the transfer behind the kernel, so only the header is left to write.
    __device__ static void send(uint8_t* message, const MessageHeader& header) {
        *reinterpret_cast<MessageHeader*>(message) = header;
    }

    // `rank` is the sender; reports name it as `awaited.peer`. A message of another operation may have the same size.
    template <typename Reports = DefaultReports, typename Common>
    __device__ static bool arrived(const Common& common, const MessageHeader& header, const MessageHeader& ours,
                                   const Awaited& awaited, uint32_t rank) {
        const uint32_t differs = (header.channel ^ ours.channel) | (header.epoch ^ ours.epoch) |
                                 (header.stage ^ ours.stage) | (header.fingerprint ^ ours.fingerprint) |
                                 (header.scales_word ^ ours.scales_word) | (header.handle ^ ours.handle);
        return (differs | header.failed) == 0 || refuse_message<Reports>(common, header, ours, awaited, rank);
    }
};

// Whether `arrived(i)` holds for all `count` messages. All threads of a block call it.
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
