// The switch itself, and the stacks: mapped lazily, with a page below each that catches overflow.
#include "fiber.h"

#include <sys/mman.h>

#include "failure.h"

// simt_switch(save, load): pushes the callee-saved registers, stores the stack pointer to *save,
// takes the stack pointer `load`, pops and returns there.
asm(R"(
.text
.globl simt_switch
.hidden simt_switch
.type simt_switch, @function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size simt_switch, .-simt_switch
)");

extern "C" void simt_switch(void** save, void* load);

namespace simt {
namespace {

constexpr std::size_t kStackBytes = 96 * 1024;
constexpr std::size_t kGuardBytes = 4096;
constexpr std::size_t kSavedRegisters = 6;

}  // namespace

Fiber::Fiber() {
    void* memory = mmap(nullptr, kStackBytes + kGuardBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, kGuardBytes, PROT_NONE) != 0) {
        Fail("no memory for the stack of a thread");
    }
    memory_ = static_cast<uint8_t*>(memory);
}

Fiber::~Fiber() { munmap(memory_, kStackBytes + kGuardBytes); }

void Fiber::Prepare(void (*body)()) {
    // The switch pops the registers and returns into `body`, which then finds its stack as after a
    // call: 8 bytes below a multiple of 16.
    void** top = reinterpret_cast<void**>(memory_ + kGuardBytes + kStackBytes) - 2;
    *top = reinterpret_cast<void*>(body);
    fiber_top_ = top - kSavedRegisters;
}

void Fiber::Enter() { simt_switch(&caller_top_, fiber_top_); }

void Fiber::Leave() { simt_switch(&fiber_top_, caller_top_); }

}  // namespace simt
