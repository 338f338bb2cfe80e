#include "suites/fuzz/player.h"

namespace test_fuzz {
namespace {

constexpr double kAgreeLimitSeconds = 60;
// A few deadlines of 250 ms, and what a busy machine adds.
constexpr double kDifferLimitSeconds = 10;

}  // namespace

Player::Player(const Options& options, const Seat& seat)
    : options_(options),
      seat_(seat),
      referee_({options.agree, options.agree ? kAgreeLimitSeconds : kDifferLimitSeconds,
                options.verbose},
               seat.rank, seat.number),
      memory_(static_cast<unsigned>(seat.size), ep_mix(options.seed, seat.number, 7)),
      shared_(0),
      own_(0) {
    // Of several threads, none may wait for another's streams by way of the default stream.
    for (unsigned i = 0; i < kStreams; ++i) {
        const bool blocking = i == 0 && options.threads == 1;
        EP_REQUIRE_CUDA(cudaStreamCreateWithFlags(
            &streams_[i], blocking ? cudaStreamDefault : cudaStreamNonBlocking));
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
    if (last_group_ != nullptr && last_group_ != group) {
        EP_REQUIRE_CUDA(cudaStreamWaitEvent(stream, last_, 0));
    }
    last_group_ = group;
}

void Player::Ordered(cudaStream_t stream) { EP_REQUIRE_CUDA(cudaEventRecord(last_, stream)); }

void Player::Rest() {
    bool good = true;
    for (cudaStream_t stream : streams_) {
        good = cudaStreamSynchronize(stream) == cudaSuccess && good;
    }
    if (options_.threads == 1) good = cudaStreamSynchronize(nullptr) == cudaSuccess && good;
    // An exchange that was lost leaves its error on the stream.
    referee_.Check(good || referee_.lost(), "a stream has failed");
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
        case 0:
            return nullptr;
        case 1:
            return other;
        case 2:
            return reinterpret_cast<void*>(uintptr_t{dice.Below(16)});
        case 3:
            return reinterpret_cast<void*>(uintptr_t{dice.Seed() | (1ULL << 52)});
        default:
            return dead.empty() ? WildPointer() : dead[index % dead.size()];
    }
}

void Player::Open(unsigned round) {
    const uint64_t seed = ep_mix(options_.seed, round, seat_.number);
    shared_ = Dice(ep_mix(seed, 1, 0));
    own_ = Dice(ep_mix(seed, 2, static_cast<uint64_t>(seat_.rank)));
    static const unsigned kDivisors[] = {1, 1, 6, 30};
    own_percent_ = options_.own_percent / shared_.Pick(kDivisors);
    last_group_ = nullptr;
    referee_.BeginRound(options_.seed, round);
    for (unsigned i = 0; i < 6; ++i) {
        const uint64_t one = shared_.Seed();
        Draw draw{Dice(one), Dice(one), false, !options_.agree, true};
        if (i < 2) {
            CreateGroup(draw);
        } else {
            CreateHandle(draw, i % 2 == 1 && seat_.has_ht);
        }
    }
}

void Player::Play(unsigned calls) {
    const uint64_t end = referee_.calls() + calls;
    while (referee_.calls() < end && !referee_.lost()) Step();
}

void Player::Step() {
    const uint64_t seed = shared_.Seed();
    const bool collective = shared_.OneIn(9);
    const bool own = !options_.agree && own_.Below(100) < own_percent_;
    const uint64_t how = own ? own_.Seed() : seed;
    const bool alone = own && !collective;
    Draw draw{Dice(ep_mix(alone ? how : seed, 1, 0)), Dice(ep_mix(how, 2, 0)), alone,
              collective && !options_.agree, false};
    if (collective) {
        Collective(draw);
    } else {
        Local(draw);
    }
}

void Player::Collective(Draw& draw) {
    const unsigned choice = draw.what.Below(8);
    if (choice >= 4) {
        // On the CPU backend this is an exchange over NCCL, which can be lost where ranks differ.
        if (options_.agree || options_.creation) CreateHandle(draw, true);
    } else if (options_.creation) {
        choice >= 2 ? CreateGroup(draw) : DestroyGroup(draw);
    }
}

void Player::Local(Draw& draw) {
    const unsigned choice = draw.what.Below(100);
    if (choice < 46) return Operate(draw);
    if (choice < 58) return Complete(draw);
    if (choice < 68) return CreateHandle(draw, false);
    if (choice < 75) return DestroyHandle(draw);
    if (choice < 81) return CreateTensor(draw);
    if (choice < 86) return DestroyTensor(draw);
    if (choice < 89) return AskGroup(draw);
    if (choice < 93) return AskHandle(draw);
    if (choice < 94) return AskVersion(draw);
    if (choice < 96) return DestroyBadGroup(draw);
    if (choice < 98) return UpdateIds(draw);
    Rest();
    CheckHealth();
}

void Player::Close() {
    // What is behind a lost exchange ends when its communicator does.
    if (!referee_.lost()) {
        Rest();
        CheckHealth();
    }
    const bool groups_first = shared_.OneIn(3);
    for (unsigned pass = 0; pass < 2; ++pass) {
        if ((pass == 0) == groups_first) {
            for (size_t i = 0; i < kGroups; ++i) DestroyGroupAt(i, AnyStream(shared_));
        } else {
            for (size_t i = 0; i < kMostHandles; ++i) DestroyHandleAt(i);
        }
    }
}

void Player::DestroyTensors() {
    for (size_t i = 0; i < kTensors; ++i) DestroyTensorAt(i, tensors_[i].group);
}

void Player::ExpectRoundTrip() {
    referee_.BeginRound(options_.seed, 0);
    referee_.set_strict(true);
    const auto draw = [] { return Draw{Dice(1), Dice(1), false, true, true}; };
    Draw creation = draw();
    CreateGroup(creation);
    const bool high_throughput = !groups_[0].low_latency;
    Draw handle = draw();
    CreateHandle(handle, high_throughput);
    for (const bool dispatch : {true, false}) {
        Lists lists;
        Draw operation = draw();
        (void)DrawLists(operation, handles_[0], dispatch, &lists);
        Launch(handles_[0].number, dispatch, lists, {0, nullptr, streams_[0]});
    }
    Rest();
    referee_.Check(handles_[0].number != nullptr, "a new group works");
    CheckHealth();
    DestroyHandleAt(0);
    DestroyGroupAt(0, streams_[0]);
    referee_.set_strict(false);
}

}  // namespace test_fuzz
