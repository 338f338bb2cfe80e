// Fibers for x86-64: each thread of a block is one. The switch saves what the calling convention
// asks a callee to save, and nothing else; it makes no system call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

// simt_switch(save, load): see fiber.cpp.
extern "C" void simt_switch(void** save, void* load);

namespace simt {

// A stack, and where it was left.
class Fiber {
   public:
    // `stack` is its lowest byte.
    explicit Fiber(uint8_t* stack);

    // Makes the next switch to it start `body`, which must not return.
    void Prepare(void (*body)());
    // Goes on with `next`, another fiber of the same OS thread; called inside this one. Refuses to leave from below the
    // stack. Every fiber is left and found at this one call, so a CPU foresees where the switch returns to.
    void SwitchTo(const Fiber& next) {
        if (__builtin_frame_address(0) < static_cast<void*>(canary_)) FailForStack();
        simt_switch(&top_, next.top_);
    }
    // Refuses one that has been below its stack. Not part of each switch, which it would slow by a tenth.
    void CheckCanary() const;

   private:
    friend class Fibers;
    [[noreturn]] static void FailForStack();

    uint64_t* canary_;
    void* top_ = nullptr;
};

// The fibers of an OS thread, one for each thread of a block. They stay as long as the process, as
// that thread does: mapping stacks takes longer than a small kernel.
class Fibers {
   public:
    // Makes sure that there are `count`.
    void Reserve(std::size_t count);
    Fiber& operator[](std::size_t index) { return fibers_[index]; }
    // Runs `first`, and those that it switches to, until one of them goes back.
    void Enter(const Fiber& first) { simt_switch(&caller_top_, first.top_); }
    void GoBack() {
        void* left = nullptr;
        simt_switch(&left, caller_top_);
    }

   private:
    std::vector<Fiber> fibers_;
    void* caller_top_ = nullptr;
};

}  // namespace simt
