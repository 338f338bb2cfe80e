// What is timed: a dispatch and a combine, by the library or by NCCL alone; and the events for that.
#pragma once

#include <chrono>
#include <functional>

#include "harness/base.h"
#include "programs/ep_bench/stats.h"

namespace ep_bench {

using Enqueue = std::function<void()>;

// Each enqueues something and does not wait for it.
struct Calls {
    Enqueue call_dispatch;
    Enqueue call_combine;
    Enqueue call_complete;  // follows each of the former
    // With --cast outside: makes the rows that the dispatch reads.
    Enqueue call_cast{};

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

// The host's time inside a call.
template <typename Call>
void TimeCall(const Call& call, Samples* samples) {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point before = Clock::now();
    call();
    samples->push_back(std::chrono::duration<double, std::micro>(Clock::now() - before).count());
}

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
