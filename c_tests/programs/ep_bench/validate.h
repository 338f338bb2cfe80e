// One more dispatch and combine; every bit of their results is compared with the reference.
#pragma once

#include <stdint.h>

#include <functional>

#include "harness/harness.h"
#include "programs/ep_bench/options.h"
#include "programs/ep_bench/routing.h"
#include "programs/ep_bench/session.h"

namespace ep_bench {

struct Wrong {
    uint64_t dispatch_rows = 0;
    uint64_t combine_rows = 0;
    uint64_t cast_rows = 0;  // with --cast outside: of what the dispatch got

    bool none() const { return dispatch_rows == 0 && combine_rows == 0 && cast_rows == 0; }
};

// How the two operations are enqueued: by calls, or by graphs.
struct Operations {
    std::function<void()> dispatch;  // behind the cast, with --cast outside
    std::function<void()> combine;
    bool replay = false;  // graphs
};

// Collective; the sum over all ranks, in every process.
Wrong Validate(const EpEnv& env, const Options& options, const Routing& routing, Session* session,
               const Operations& operations);

}  // namespace ep_bench
