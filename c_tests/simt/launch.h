// Runs a kernel: all blocks at once, as its blocks may wait for each other's peers.
#pragma once

#include <cstdint>
#include <functional>

namespace simt {

// Most threads of a block.
constexpr uint32_t kMaxThreads = 1024;

struct LaunchShape {
    uint32_t blocks;
    uint32_t threads;
    uint32_t shared_bytes;
    bool early = false;  // programmatic: while the kernel before it may run
};

// Returns when the grid has ended. The order in which threads run follows from `seed` within each
// block; between blocks the operating system decides.
void Launch(const LaunchShape& shape, uint64_t seed, const std::function<void()>& kernel);

}  // namespace simt
