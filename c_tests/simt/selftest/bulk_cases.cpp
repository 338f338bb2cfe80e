// Bulk copies and mbarriers: a pipeline of two stages from memory through shared memory to memory,
// right and with one mistake at a time.
#include "../launch.h"
#include "../ptx_cpu.h"
#include "cases.h"

namespace simt_selftest {
namespace {

constexpr uint32_t kStages = 2;
constexpr uint32_t kPieces = 8;
constexpr uint32_t kPieceBytes = 64;
constexpr uint32_t kPieceWords = kPieceBytes / sizeof(uint32_t);

enum class Mistake {
    kNone,
    kNoWaitForLoad,
    kWrongParity,
    kNoWaitForRead,
    kTooFewBytes,
    kTooManyArrivals,
    kNoInit,
    kMisaligned,
    kStoresNotRead,
    kLoadLeft,
};

struct Pipeline {
    alignas(16) uint32_t from[kPieces * kPieceWords];
    alignas(16) uint32_t to[kPieces * kPieceWords];
    Mistake mistake;
};

simt::Bulk& Copies() { return simt::Block::Current().bulk(); }

void StartLoad(const Pipeline& pipeline, uint32_t piece, uint8_t* shared, uint64_t* barriers) {
    const uint32_t stage = piece % kStages;
    const bool too_few = pipeline.mistake == Mistake::kTooFewBytes && piece == 3;
    Copies().ArriveExpecting(&barriers[stage], kPieceBytes - (too_few ? 16 : 0));
    const uint32_t skew = pipeline.mistake == Mistake::kMisaligned ? 8 : 0;
    Copies().Load(shared + stage * kPieceBytes, &pipeline.from[piece * kPieceWords],
                  kPieceBytes - skew, &barriers[stage]);
}

// One thread does it all; what it would pass on to others in a real kernel is not the subject.
void RunPipeline(Pipeline& pipeline) {
    DYNAMIC_SHARED(uint8_t, shared);
    auto* barriers = reinterpret_cast<uint64_t*>(shared + 2 * kStages * kPieceBytes);
    uint8_t* outgoing = shared + kStages * kPieceBytes;
    const Mistake mistake = pipeline.mistake;
    for (uint32_t i = 0; i < kStages && mistake != Mistake::kNoInit; ++i) {
        nccl_ep::mbarrier_init(&barriers[i], 1);
    }
    for (uint32_t piece = 0; piece < kStages; ++piece) StartLoad(pipeline, piece, shared, barriers);
    for (uint32_t piece = 0; piece < kPieces; ++piece) {
        const uint32_t stage = piece % kStages;
        const uint32_t parity = piece / kStages % 2 ^ (mistake == Mistake::kWrongParity ? 1 : 0);
        while (mistake != Mistake::kNoWaitForLoad && !nccl_ep::mbarrier_test_wait(&barriers[stage], parity)) {
            nccl_ep::shared_spin_hint();
        }
        if (mistake != Mistake::kNoWaitForRead) Copies().WaitUntilRead(0, kStages - 1);
        std::memcpy(outgoing + stage * kPieceBytes, shared + stage * kPieceBytes, kPieceBytes);
        Copies().Store(0, &pipeline.to[piece * kPieceWords], outgoing + stage * kPieceBytes, kPieceBytes);
        Copies().CommitStores(0);
        if (piece + kStages < kPieces) StartLoad(pipeline, piece + kStages, shared, barriers);
    }
    if (mistake == Mistake::kLoadLeft) StartLoad(pipeline, 0, shared, barriers);
    if (mistake == Mistake::kTooManyArrivals) {
        Copies().ArriveExpecting(&barriers[0], kPieceBytes);
        Copies().ArriveExpecting(&barriers[0], 0);
    }
    if (mistake != Mistake::kStoresNotRead) Copies().WaitUntilRead(0, 0);
}

template <Mistake kMistake>
bool Try(uint64_t seed) {
    Pipeline pipeline = {};
    pipeline.mistake = kMistake;
    for (uint32_t i = 0; i < kPieces * kPieceWords; ++i) pipeline.from[i] = i + 1;
    simt::Launch({1, 32, 2 * kStages * kPieceBytes + kStages * sizeof(uint64_t)}, seed, [&] {
        if (threadIdx.x == 0) RunPipeline(pipeline);
    });
    return std::memcmp(pipeline.from, pipeline.to, sizeof(pipeline.from)) == 0;
}

}  // namespace

std::vector<Case> BulkCases() {
    return {
        {"bulk_pipeline", Wanted::kRight, Try<Mistake::kNone>},
        {"bulk_wrong_parity", Wanted::kRefused, Try<Mistake::kWrongParity>, "the kernel does not end"},
        {"bulk_no_wait_for_read", Wanted::kWrong, Try<Mistake::kNoWaitForRead>},
        {"bulk_no_wait_for_load", Wanted::kRefused, Try<Mistake::kNoWaitForLoad>, "more arrivals at an mbarrier"},
        {"bulk_too_few_bytes", Wanted::kRefused, Try<Mistake::kTooFewBytes>, "the kernel does not end"},
        {"bulk_too_many_arrivals", Wanted::kRefused, Try<Mistake::kTooManyArrivals>, "more arrivals at an mbarrier"},
        {"bulk_barrier_not_initialised", Wanted::kRefused, Try<Mistake::kNoInit>,
         "an mbarrier is used that was not initialised"},
        {"bulk_misaligned", Wanted::kRefused, Try<Mistake::kMisaligned>, "multiples of 16"},
        {"bulk_stores_not_read", Wanted::kRefused, Try<Mistake::kStoresNotRead>,
         "before it waited until its bulk stores had read"},
        {"bulk_load_left_behind", Wanted::kRefused, Try<Mistake::kLoadLeft>,
         "while bulk copies into its shared memory were under way"},
    };
}

}  // namespace simt_selftest
