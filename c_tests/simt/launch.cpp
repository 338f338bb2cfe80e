// The OS threads that run blocks. They live as long as the process, so that static shared memory,
// which is local to them, holds the leftovers of earlier kernels as on a GPU.
#include "launch.h"

#include <sys/mman.h>

#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>

#include "block.h"
#include "support.h"

namespace simt {
namespace {

// What a block of an H200 may have.
constexpr uint32_t kMaxSharedBytes = 227 << 10;
constexpr std::size_t kPage = 4096;
constexpr std::size_t kMappedBytes = (kMaxSharedBytes + kPage - 1) / kPage * kPage;
constexpr std::size_t kSharedAlign = 128;
constexpr uint8_t kPoison = 0xcb;
constexpr uint64_t kHangSeconds = 60;

// Dynamic shared memory: the last byte is followed by a page that nobody may touch.
class SharedMemory {
   public:
    SharedMemory() {
        void* memory = mmap(nullptr, kMappedBytes + kPage, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) Fail("no shared memory for a block");
        end_ = static_cast<uint8_t*>(memory) + kMappedBytes;
        if (mprotect(end_, kPage, PROT_NONE) != 0) Fail("no page behind a block's shared memory");
    }
    // Poisoned memory of so many bytes, rounded up to the alignment that kernels ask for.
    uint8_t* Take(uint32_t bytes) {
        const std::size_t rounded = (bytes + kSharedAlign - 1) / kSharedAlign * kSharedAlign;
        std::memset(end_ - rounded, kPoison, rounded);
        return end_ - rounded;
    }

   private:
    uint8_t* end_;
};

// What a launch's workers share.
struct Job {
    Grid grid;
    const std::function<void()>* kernel;
    uint32_t left;
};

class Workers {
   public:
    void Run(const Grid& grid, const std::function<void()>& kernel) {
        std::unique_lock<std::mutex> lock(mutex_);
        Job job = {grid, &kernel, grid.blocks};
        for (uint32_t index = 0; index < grid.blocks; ++index) queue_.push_back({&job, index});
        while (workers_ < busy_ + queue_.size()) {
            ++workers_;
            std::thread([this] { Serve(); }).detach();
        }
        for (uint32_t index = 0; index < grid.blocks; ++index) begin_.notify_one();
        end_.wait(lock, [&job] { return job.left == 0; });
    }

   private:
    void Serve() {
        Fibers fibers;
        SharedMemory shared;
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            begin_.wait(lock, [this] { return !queue_.empty(); });
            const auto [job, index] = queue_.back();
            queue_.pop_back();
            ++busy_;
            lock.unlock();
            {
                Block block(job->grid, index, shared.Take(job->grid.shared_bytes), fibers);
                block.Run(*job->kernel);
            }
            lock.lock();
            --busy_;
            if (--job->left == 0) end_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable begin_, end_;
    std::vector<std::pair<Job*, uint32_t>> queue_;
    std::size_t workers_ = 0;
    std::size_t busy_ = 0;
};

}  // namespace

void Launch(const LaunchShape& shape, uint64_t seed, const std::function<void()>& kernel) {
    if (shape.blocks == 0 || shape.threads == 0 || shape.threads > kMaxThreads ||
        shape.threads % kLanes != 0 || shape.shared_bytes > kMaxSharedBytes) {
        Fail("a launch of " + std::to_string(shape.blocks) + " blocks of " +
             std::to_string(shape.threads) + " threads (whole warps, at most 1024) and " +
             std::to_string(shape.shared_bytes) + " bytes of shared memory");
    }
    static const uint64_t hang_seconds = Setting("NCCLEP_SIMT_HANG_SECONDS", kHangSeconds);
    static Workers* const workers = new Workers;  // never destroyed: its threads do not end
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(hang_seconds);
    workers->Run({shape.blocks, shape.threads, shape.shared_bytes, shape.early, seed, deadline}, kernel);
}

}  // namespace simt
