// Times of dispatch and combine, measured with events around the calls as the reference's program
// does it, and their statistics over iterations and ranks.
#ifndef C_TESTS_EP_BENCH_TIMING_H_
#define C_TESTS_EP_BENCH_TIMING_H_

#include <array>

#include "ep_bench_options.h"
#include "ep_bench_session.h"
#include "harness/harness.h"

namespace ep_bench {

// The four measured spans of an iteration:
//   start -- dispatch -- mid -- host waits -- resume -- combine -- end
enum Span : unsigned {
    kDispatch,     // start to mid
    kCombine,      // mid to end: contains the wait of the host, which is the reference's convention
    kTotal,        // start to end
    kCombineCall,  // resume to end: the combine alone
    kSpans
};

struct Stats {
    double average_us = 0;
    double min_us = 0;
    double max_us = 0;
};

struct Timing {
    std::array<Stats, kSpans> rank;  // of this process
    std::array<Stats, kSpans>
        all;  // mean of the averages, min of the mins, max of the maxes; process 0
    std::array<double, kSpans> median_us{};  // over iterations, the slowest rank of each; process 0
};

// Collective. The first measured iteration is dropped if there are more.
Timing Measure(const EpEnv& env, const Options& options, Session* session);

}  // namespace ep_bench

#endif  // C_TESTS_EP_BENCH_TIMING_H_
