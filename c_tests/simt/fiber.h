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

    // Makes the next Enter start `body`, which must end with Leave.
    void Prepare(void (*body)());
    // Runs the fiber until it leaves; called outside of fibers, always on the same OS thread.
    // Refuses one that leaves from below its stack.
    void Enter() {
        simt_switch(&caller_top_, fiber_top_);
        if (fiber_top_ < static_cast<void*>(canary_)) FailForStack();
    }
    // Goes back to the caller of Enter; called inside the fiber.
    void Leave() { simt_switch(&fiber_top_, caller_top_); }
    // Refuses one that has been below its stack. Not part of Enter, which it would slow by a tenth.
    void CheckCanary() const;

   private:
    [[noreturn]] static void FailForStack();

    uint64_t* canary_;
    void* fiber_top_ = nullptr;
    void* caller_top_ = nullptr;
};

// The fibers of an OS thread, one for each thread of a block. They stay as long as the process, as
// that thread does: mapping stacks takes longer than a small kernel.
class Fibers {
   public:
    // Makes sure that there are `count`.
    void Reserve(std::size_t count);
    Fiber& operator[](std::size_t index) { return fibers_[index]; }

   private:
    std::vector<Fiber> fibers_;
};

}  // namespace simt
