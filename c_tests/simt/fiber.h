// Fibers for x86-64: each thread of a block is one. The switch saves what the calling convention
// asks a callee to save, and nothing else; it makes no system call.
#ifndef C_TESTS_SIMT_FIBER_H_
#define C_TESTS_SIMT_FIBER_H_

#include <cstddef>
#include <cstdint>

namespace simt {

// A stack, and where it was left.
class Fiber {
   public:
    Fiber();
    ~Fiber();
    Fiber(const Fiber&) = delete;
    Fiber& operator=(const Fiber&) = delete;

    // Makes the next Enter start `body`, which must end with Leave.
    void Prepare(void (*body)());
    // Runs the fiber until it leaves; called outside of fibers, always on the same OS thread.
    void Enter();
    // Goes back to the caller of Enter; called inside the fiber.
    void Leave();

   private:
    uint8_t* memory_;
    void* fiber_top_ = nullptr;
    void* caller_top_ = nullptr;
};

}  // namespace simt

#endif  // C_TESTS_SIMT_FIBER_H_
