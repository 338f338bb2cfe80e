// What crosses the network between nodes: computed from the routing, as the library sends it, and
// sent by NCCL alone for comparison.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

#include "harness/harness.h"
#include "programs/ep_bench/options.h"
#include "programs/ep_bench/routing.h"

namespace ep_bench {

// All bytes from this rank to another one in one operation, or the reverse.
struct Message {
    unsigned peer;
    size_t bytes;
};

struct Exchange {
    std::vector<Message> sends;
    std::vector<Message> receives;

    size_t SentBytes() const;
};

struct Network {
    // Rows of this rank: each token once for each other node with one of its experts.
    uint64_t rows_once = 0;
    // In low latency the library sends all tokens to a rail peer on each other node, and every node
    // returns a sum for each of them. In high throughput it sends only the former rows. What goes
    // with the rows (ids, weights, heads of messages) is counted, too. No messages on one node.
    Exchange dispatch;
    Exchange combine;
};

Network CountNetwork(const Options& options, const Routing& routing);

// The same bytes between the same ranks by NCCL's grouped sends and receives, on the program's own
// communicator: what an operation would cost if there were nothing else in it.
class NcclAlone {
   public:
    NcclAlone(const EpEnv& env, const Network& network);
    ~NcclAlone();
    NcclAlone(const NcclAlone&) = delete;
    NcclAlone& operator=(const NcclAlone&) = delete;

    void Dispatch() { Run(network_.dispatch); }
    void Combine() { Run(network_.combine); }

   private:
    void Run(const Exchange& exchange);

    const EpEnv& env_;
    Network network_;
    char* sent_ = nullptr;      // every message is sent from here
    char* received_ = nullptr;  // all messages, one after the other
};

// False where ranks share a GPU: what stands in for NCCL there sends no messages.
bool HasMessages();

}  // namespace ep_bench
