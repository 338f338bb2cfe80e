// What is timed: a dispatch and a combine, by the library or by NCCL alone; and the events for that.
#pragma once

#include <functional>

#include "harness/harness.h"

namespace ep_bench {

// Each enqueues something and does not wait for it.
struct Calls {
    std::function<void()> call_dispatch;
    std::function<void()> call_combine;
    std::function<void()> call_complete;  // follows each of the former
    // With --cast outside: makes the rows that the dispatch reads.
    std::function<void()> call_cast{};

    void Dispatch() const {
        call_dispatch();
        call_complete();
    }
    void CastAndDispatch() const {
        call_cast();
        Dispatch();
    }
    void Combine() const {
        call_combine();
        call_complete();
    }
    void Pair() const {
        Dispatch();
        Combine();
    }
    void CastAndPair() const {
        CastAndDispatch();
        Combine();
    }
};

// A timing event with a lifetime.
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
