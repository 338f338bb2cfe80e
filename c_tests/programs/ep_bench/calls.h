// What is timed: a dispatch and a combine, by the library or by NCCL alone.
#pragma once

#include <functional>

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
};

}  // namespace ep_bench
