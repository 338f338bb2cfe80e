// Messages between nodes, and NCCL's sends and receives of them.
#include "programs/ep_bench/network.h"

#include <algorithm>

#include "harness/nodes.h"
#include "programs/ep_bench/result.h"

// Weak, because fake_nccl does not have them.
#pragma weak ncclGroupStart
#pragma weak ncclGroupEnd
#pragma weak ncclSend
#pragma weak ncclRecv

namespace ep_bench {
namespace {

// The tokens of a rank with an expert on each node; its own counts, too.
std::vector<uint64_t> TokensByNode(const Routing& routing, unsigned source) {
    std::vector<uint64_t> tokens(ep_num_nodes());
    for (unsigned token = 0; token < routing.shape().tokens[source]; ++token) {
        std::vector<bool> seen(tokens.size());
        for (const unsigned rank : routing.Destinations(source, token)) {
            const unsigned node = ep_node_of(rank);
            tokens[node] += seen[node] ? 0 : 1;
            seen[node] = true;
        }
    }
    return tokens;
}

// Bytes of all messages that concern the tokens of one rank and one other node.
struct Leg {
    size_t there = 0;     // in a dispatch
    size_t weights = 0;   // in a combine, before the node can sum
    size_t returned = 0;  // in a combine
};

Leg LegOf(const Options& options, unsigned all_tokens, uint64_t tokens_of_node) {
    // Without --dispatch the data is bfloat16, whatever --use-fp8 says.
    const auto row = static_cast<size_t>(CombineRowBytes(options));
    const size_t sent = options.rows.scaled ? ref_format_slot_bytes(&*options.rows.scaled) : row;
    const size_t ids = options.top_k * sizeof(int64_t);
    const size_t weights = options.top_k * sizeof(float);
    if (options.low_latency()) {
        constexpr size_t kHead = 32;  // which operation it is
        return {kHead + all_tokens * (sent + ids), kHead + all_tokens * weights, kHead + all_tokens * row};
    }
    return {tokens_of_node * (sent + ids + weights), 0, tokens_of_node * row};
}

void Add(unsigned peer, size_t bytes, std::vector<Message>* messages) {
    const auto same = [peer](const Message& message) { return message.peer == peer; };
    const auto found = std::find_if(messages->begin(), messages->end(), same);
    if (bytes == 0) return;
    if (found != messages->end()) {
        found->bytes += bytes;
    } else {
        messages->push_back({peer, bytes});
    }
}

size_t TotalBytes(const std::vector<Message>& messages) {
    size_t bytes = 0;
    for (const Message& message : messages) bytes += message.bytes;
    return bytes;
}

}  // namespace

size_t Exchange::SentBytes() const { return TotalBytes(sends); }

Network CountNetwork(const Options& options, const Routing& routing) {
    Network network;
    const unsigned self = routing.rank();
    for (unsigned source = 0; source < routing.shape().ranks; ++source) {
        const std::vector<uint64_t> by_node = TokensByNode(routing, source);
        for (unsigned node = 0; node < by_node.size(); ++node) {
            if (node == ep_node_of(source)) continue;
            const unsigned rail_peer = ep_rail_peer(source, node);
            const Leg leg = LegOf(options, routing.shape().tokens[source], by_node[node]);
            if (source == self) {
                network.rows_once += by_node[node];
                Add(rail_peer, leg.there, &network.dispatch.sends);
                Add(rail_peer, leg.weights, &network.combine.sends);
                Add(rail_peer, leg.returned, &network.combine.receives);
            } else if (rail_peer == self) {
                Add(source, leg.there, &network.dispatch.receives);
                Add(source, leg.weights, &network.combine.receives);
                Add(source, leg.returned, &network.combine.sends);
            }
        }
    }
    return network;
}

NcclAlone::NcclAlone(const EpEnv& env, const Network& network) : env_(env), network_(network) {
    size_t most_sent = 1;
    size_t most_received = 1;
    for (const Exchange* exchange : {&network_.dispatch, &network_.combine}) {
        for (const Message& message : exchange->sends) most_sent = std::max(most_sent, message.bytes);
        most_received = std::max(most_received, TotalBytes(exchange->receives));
    }
    sent_ = static_cast<char*>(ep_device_alloc(most_sent));
    received_ = static_cast<char*>(ep_device_alloc(most_received));
}

NcclAlone::~NcclAlone() {
    EP_REQUIRE_CUDA(cudaStreamSynchronize(env_.stream));
    ep_device_free(sent_);
    ep_device_free(received_);
}

void NcclAlone::Run(const Exchange& exchange) {
    EP_REQUIRE_NCCL(ncclGroupStart());
    for (const Message& message : exchange.sends) {
        EP_REQUIRE_NCCL(ncclSend(sent_, message.bytes, ncclInt8, static_cast<int>(message.peer),
                                 env_.comm, env_.stream));
    }
    char* to = received_;
    for (const Message& message : exchange.receives) {
        EP_REQUIRE_NCCL(ncclRecv(to, message.bytes, ncclInt8, static_cast<int>(message.peer), env_.comm, env_.stream));
        to += message.bytes;
    }
    EP_REQUIRE_NCCL(ncclGroupEnd());
}

bool HasMessages() {
    return ncclGroupStart != nullptr && ncclGroupEnd != nullptr && ncclSend != nullptr && ncclRecv != nullptr;
}

}  // namespace ep_bench
