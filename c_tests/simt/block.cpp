// The scheduler of a block's threads, and where they meet.
#include "block.h"

#include <unistd.h>

#include <cstring>

#include "failure.h"

namespace simt {
namespace {

// Of ten steps, how many go on with the thread that became ready last, in blocks that run ahead.
constexpr uint64_t kStepsAhead = 8;
constexpr uint64_t kOneInYields = 4;
constexpr uint64_t kOneInLingers = 8;
constexpr useconds_t kLingerMicroseconds = 100;
// How long a block sleeps after a round of polling. It never yields instead: Linux 6.18 lets a thread that often
// does wait for seconds while others have work, and the deadlines of waits pass.
constexpr useconds_t kPollMicroseconds = 10;

std::string RunningThread() { return Block::IsRunning() ? Block::Current().Where() : ""; }

}  // namespace

__thread Block* Block::current_block_ = nullptr;

Block::Block(const Grid& grid, uint32_t index, uint8_t* dynamic_shared, Fibers& fibers)
    : grid_(grid),
      index_(index),
      dynamic_shared_(dynamic_shared),
      fibers_(fibers),
      random_(grid.seed * 977 + index),
      stores_(grid.threads, random_),
      bulk_(random_, stores_),
      runs_ahead_(random_.OneIn(2)),
      threads_(grid.threads),
      warps_(grid.threads / kLanes),
      live_(grid.threads / kLanes, ~0u) {
    for (std::vector<uint64_t>& values : whole_.values) {
        values.resize(grid.threads);
    }
    fibers_.Reserve(grid.threads);
    current_block_ = this;
    NameRunningThreadBy(&RunningThread);
}

Block::~Block() { current_block_ = nullptr; }

void Block::ThreadMain() {
    (*Current().kernel_)();
    Current().EndThread();
}

void Block::Run(const std::function<void()>& kernel) {
    kernel_ = &kernel;
    alive_ = grid_.threads;
    for (uint32_t i = 0; i < grid_.threads; ++i) {
        fibers_[i].Prepare(&ThreadMain);
        ready_.push_back(i);
    }
    while (alive_ != 0) {
        if (ready_.empty()) {
            Fail("no thread of the block can go on: " + WhereThreadsAre());
        }
        stores_.Step();
        thread_ = PickReady();
        fibers_[thread_].Enter();
        if (threads_[thread_].has_ended) {
            fibers_[thread_].CheckCanary();
        } else if (threads_[thread_].waits_at == nullptr) {
            ready_.push_back(thread_);
        }
    }
    bulk_.Finish();
    stores_.LandAll();
}

uint32_t Block::PickReady() {
    const bool last = runs_ahead_ && random_.Below(10) < kStepsAhead;
    const std::size_t at = last ? ready_.size() - 1 : random_.Below(ready_.size());
    const uint32_t picked = ready_[at];
    ready_[at] = ready_.back();
    ready_.pop_back();
    return picked;
}

void Block::SwitchOut() { fibers_[thread_].Leave(); }

// The thread's kernel has returned: barriers and warp operations go on without it.
void Block::EndThread() {
    threads_[thread_].has_ended = true;
    live_[thread_ / kLanes] &= ~(1u << thread_ % kLanes);
    --alive_;
    stores_.MeetBlock(thread_);
    if (whole_.arrived != 0 && whole_.arrived == alive_) {
        EndRound(whole_);
    }
    for (auto& [mask, meeting] : warps_[thread_ / kLanes]) {
        const uint32_t live = LiveLanes(thread_ / kLanes, mask);
        if (meeting.arrived != 0 && meeting.arrived == live) {
            EndRound(meeting);
        }
    }
    SwitchOut();
}

uint32_t Block::LiveLanes(uint32_t warp, uint32_t mask) const {
    return static_cast<uint32_t>(__builtin_popcount(mask & live_[warp]));
}

void Block::Arrive(Meeting& meeting, const char* operation, uint32_t at, uint64_t value) {
    if (meeting.arrived != 0 && std::strcmp(meeting.operation, operation) != 0) {
        Fail(std::string("threads that must meet are in ") + meeting.operation + " and " +
             operation);
    }
    meeting.operation = operation;
    meeting.values[meeting.round % 2][at] = value;
}

void Block::EndRoundOrWait(Meeting& meeting, uint32_t expected) {
    if (++meeting.arrived == expected) {
        EndRound(meeting);
        return;
    }
    threads_[thread_].waits_at = &meeting;
    meeting.waiting.push_back(thread_);
    SwitchOut();
}

void Block::EndRound(Meeting& meeting) {
    meeting.arrived = 0;
    ++meeting.round;
    for (const uint32_t thread : meeting.waiting) {
        threads_[thread].waits_at = nullptr;
        ready_.push_back(thread);
    }
    meeting.waiting.clear();
}

const uint64_t* Block::MeetWarp(const char* operation, uint32_t mask, uint64_t value) {
    const uint32_t warp = thread_ / kLanes;
    const uint32_t lane = thread_ % kLanes;
    if ((mask >> lane & 1) == 0) {
        Fail(std::string(operation) + " with a mask that does not name the calling lane");
    }
    Meeting& meeting = warps_[warp][mask];
    for (std::vector<uint64_t>& values : meeting.values) {
        values.resize(kLanes);
    }
    const uint32_t round = meeting.round;
    stores_.MeetWarp(thread_);
    Arrive(meeting, operation, lane, value);
    EndRoundOrWait(meeting, LiveLanes(warp, mask));
    return meeting.values[round % 2].data();
}

const std::vector<uint64_t>& Block::MeetBlock(const char* operation, uint64_t value) {
    const uint32_t round = whole_.round;
    stores_.MeetBlock(thread_);
    Arrive(whole_, operation, thread_, value);
    EndRoundOrWait(whole_, alive_);
    return whole_.values[round % 2];
}

void Block::MeetNamed(uint32_t id, uint32_t threads) {
    if (id == 0 || id >= kNamedBarriers || threads == 0 || threads % kLanes != 0 ||
        threads > grid_.threads) {
        Fail("barrier " + std::to_string(id) + " for " + std::to_string(threads) + " threads");
    }
    Meeting& meeting = named_[id];
    if (meeting.arrived != 0 && meeting.expected != threads) {
        Fail("barrier " + std::to_string(id) + " for " + std::to_string(meeting.expected) +
             " and for " + std::to_string(threads) + " threads");
    }
    meeting.operation = "a named barrier";
    meeting.expected = threads;
    stores_.MeetBlock(thread_);
    EndRoundOrWait(meeting, threads);
}

void Block::Poll() {
    if (++polls_ % (2 * grid_.threads) == 0) {
        EndPollingRound();
    }
    SwitchOut();
}

// So many polls that the block has probably nothing else to do.
void Block::EndPollingRound() {
    stores_.LandSome();
    usleep(kPollMicroseconds);
    if (std::chrono::steady_clock::now() > grid_.deadline) {
        Fail("the kernel does not end: " + WhereThreadsAre());
    }
}

void Block::MayYield() {
    if (random_.OneIn(kOneInYields)) {
        SwitchOut();
    }
}

void Block::MayLinger() {
    if (random_.OneIn(kOneInLingers)) {
        usleep(kLingerMicroseconds);
    }
    MayYield();
}

std::string Block::Where() const {
    return "block " + std::to_string(index_) + " of " + std::to_string(grid_.blocks) +
           ", thread " + std::to_string(thread_) + " of " + std::to_string(grid_.threads);
}

std::string Block::WhereThreadsAre() const {
    std::map<std::string, std::pair<uint32_t, uint32_t>> first_and_count;
    for (uint32_t i = grid_.threads; i-- != 0;) {
        const Thread& thread = threads_[i];
        const std::string place = thread.has_ended             ? "have ended"
                                  : thread.waits_at == nullptr ? "poll or run"
                                                               : std::string("wait at ") +
                                                                     thread.waits_at->operation;
        auto& [first, count] = first_and_count[place];
        first = i;
        ++count;
    }
    std::string text;
    for (const auto& [place, found] : first_and_count) {
        text += (text.empty() ? "" : ", ") + std::to_string(found.second) + " threads " + place +
                " (the first is " + std::to_string(found.first) + ")";
    }
    return text;
}

}  // namespace simt
