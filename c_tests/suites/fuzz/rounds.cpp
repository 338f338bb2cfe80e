// The rounds of a player: the choice of the next call; see player.h.
#include "suites/fuzz/player.h"

namespace test_fuzz {

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
    Draw draw{Dice(ep_mix(alone ? how : seed, 1, 0)), Dice(ep_mix(how, 2, 0)), alone, collective && !options_.agree,
              false};
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
        if (options_.agree || options_.creation != 0) CreateHandle(draw, true);
    } else if (options_.creation != 0) {
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
    // Work behind a lost exchange ends only with its communicator.
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
    // The library leaves alone what calls of this program have met before.
    (void)cudaGetLastError();
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
