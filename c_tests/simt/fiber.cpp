// The switch itself, and the stacks. Many lie in one mapping, since a process may have only so many
// (vm.max_map_count): so no page guards a stack, but words at its low end tell of an overflow.
#include "fiber.h"

#include <sys/mman.h>

#include <string>

#include "support.h"

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

namespace simt {
namespace {

constexpr std::size_t kPage = 4096;
// Neither whole pages nor a power of 2, so that the stacks' tops do not share a few sets of a cache.
constexpr std::size_t kStackBytes = 25 * kPage + 5 * 64;
constexpr std::size_t kStacksPerMapping = 32;
constexpr std::size_t kSavedRegisters = 6;
constexpr uint64_t kCanary = 0x5afe57ac5afe57ac;
constexpr std::size_t kCanaryWords = 8;
// Offset of a mapping's first stack, so that no stack lies at the first byte of a page: its canary would not share the
// page in which the stack below begins, and so take a page of its own.
constexpr std::size_t kFirstStack = kPage - 32;

uint8_t* MapStacks() {
    const std::size_t bytes = kPage + kStacksPerMapping * kStackBytes;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) Fail("no memory for the stacks of threads");
    // A huge page would make all of 20 stacks resident. Kernels without them refuse the advice.
    madvise(memory, bytes, MADV_NOHUGEPAGE);
    return static_cast<uint8_t*>(memory) + kFirstStack;
}

}  // namespace

Fiber::Fiber(uint8_t* stack) : canary_(reinterpret_cast<uint64_t*>(stack)) {
    for (std::size_t i = 0; i < kCanaryWords; ++i) canary_[i] = kCanary;
}

void Fiber::Prepare(void (*body)()) {
    // The switch pops the registers and returns into `body`, which then finds its stack as after a
    // call: 8 bytes below a multiple of 16.
    void** top = reinterpret_cast<void**>(canary_) + kStackBytes / sizeof(void*) - 2;
    *top = reinterpret_cast<void*>(body);
    top_ = top - kSavedRegisters;
}

void Fiber::FailForStack() {
    Fail("the thread has used more than the " + std::to_string(kStackBytes) + " bytes of its stack");
}

void Fiber::CheckCanary() const {
    for (std::size_t i = 0; i < kCanaryWords; ++i) {
        if (canary_[i] != kCanary) FailForStack();
    }
}

void Fibers::Reserve(std::size_t count) {
    while (fibers_.size() < count) {
        uint8_t* stacks = MapStacks();
        for (std::size_t i = 0; i < kStacksPerMapping; ++i) fibers_.emplace_back(stacks + i * kStackBytes);
    }
}

}  // namespace simt
