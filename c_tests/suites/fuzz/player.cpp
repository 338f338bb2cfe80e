// A player's resources, and helpers that all its calls need; see player.h.
#include "suites/fuzz/player.h"

#include "harness/nodes.h"

namespace test_fuzz {
namespace {

constexpr double kAgreeLimitSeconds = 60;
// A few deadlines of 250 ms, plus the delay of a busy machine.
constexpr double kDifferLimitSeconds = 10;

}  // namespace

Player::Player(const Options& options, const Seat& seat)
    : options_(options),
      seat_(seat),
      referee_({options.agree, options.agree ? kAgreeLimitSeconds : kDifferLimitSeconds, options.verbose != 0},
               seat.rank, seat.number),
      memory_(static_cast<unsigned>(seat.size), ep_mix(options.seed, seat.number, 7)),
      shared_(0),
      own_(0) {
    // Streams without implicit order: no thread may wait for another's streams through the default stream.
    for (unsigned i = 0; i < kStreams; ++i) {
        const bool blocking = i == 0 && options.threads == 1;
        EP_REQUIRE_CUDA(cudaStreamCreateWithFlags(&streams_[i], blocking ? cudaStreamDefault : cudaStreamNonBlocking));
    }
    EP_REQUIRE_CUDA(cudaEventCreateWithFlags(&last_, cudaEventDisableTiming));
}

Player::~Player() {
    for (cudaStream_t stream : streams_) EP_CHECK_CUDA(cudaStreamDestroy(stream));
    EP_CHECK_CUDA(cudaEventDestroy(last_));
}

cudaStream_t Player::AnyStream(Dice& dice) const {
    const unsigned index = dice.Below(options_.threads == 1 ? kStreams + 1 : kStreams);
    return index < kStreams ? streams_[index] : nullptr;
}

void Player::Order(const void* group, cudaStream_t stream) {
    if (last_group_ != nullptr && last_group_ != group) EP_REQUIRE_CUDA(cudaStreamWaitEvent(stream, last_, 0));
    last_group_ = group;
}

void Player::Ordered(cudaStream_t stream) { EP_REQUIRE_CUDA(cudaEventRecord(last_, stream)); }

void Player::Rest() {
    bool good = true;
    for (cudaStream_t stream : streams_) good = cudaStreamSynchronize(stream) == cudaSuccess && good;
    if (options_.threads == 1) good = cudaStreamSynchronize(nullptr) == cudaSuccess && good;
    // A lost exchange leaves its error on the stream; on the stand-ins, so do messages of different sizes, also on
    // streams of the library, and a free would give that error.
    const bool are_messages_compared = ep_num_nodes() > 1 && ep_on_hostsim();
    if (are_messages_compared && options_.threads == 1) (void)cudaDeviceSynchronize();
    referee_.Check(good || referee_.lost() || are_messages_compared, "a stream has failed");
}

void Player::Bury(std::vector<void*>* dead, void* number) {
    constexpr size_t kRemembered = 8;
    if (dead->size() == kRemembered) dead->erase(dead->begin());
    dead->push_back(number);
}

void* Player::BadNumber(Dice& dice, bool as_group) const {
    const auto& dead = as_group ? dead_groups_ : dead_handles_;
    const unsigned index = dice.Below(64);
    void* const other = as_group ? static_cast<void*>(handles_[index % kMostHandles].number)
                                 : static_cast<void*>(groups_[index % kGroups].number);
    switch (dice.Below(5)) {
        case 0: return nullptr;
        case 1: return other;
        case 2: return reinterpret_cast<void*>(uintptr_t{dice.Below(16)});
        case 3: return reinterpret_cast<void*>(uintptr_t{dice.Seed() | (1ULL << 52)});
        default: return dead.empty() ? WildPointer() : dead[index % dead.size()];
    }
}

}  // namespace test_fuzz
