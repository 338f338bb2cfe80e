// Timing events with a lifetime, for the loops that measure.
#pragma once

#include "harness/harness.h"

namespace ep_bench {

class Event {
   public:
    Event() { EP_REQUIRE_CUDA(cudaEventCreate(&event_)); }
    ~Event() { EP_REQUIRE_CUDA(cudaEventDestroy(event_)); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;

    void Record(cudaStream_t stream) { EP_REQUIRE_CUDA(cudaEventRecord(event_, stream)); }

    // Both events must have passed.
    double MicrosecondsSince(const Event& earlier) const {
        float milliseconds = 0;
        EP_REQUIRE_CUDA(cudaEventElapsedTime(&milliseconds, earlier.event_, event_));
        return 1e3 * static_cast<double>(milliseconds);
    }

   private:
    cudaEvent_t event_{};
};

}  // namespace ep_bench
