// The scheduler of a block's threads, and where they meet.
#include "block.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "support.h"

namespace simt {
namespace {

// Of ten steps, how many go on with the thread that became ready last, in blocks that run ahead.
constexpr uint64_t kStepsAhead = 8;
constexpr uint64_t kOneInYields = 4;
constexpr uint64_t kOneInLingers = 8;
constexpr useconds_t kLingerMicroseconds = 100;
// One block in so many begins late, as if other work had its multiprocessor: by less than 2^n microseconds, any n below
// the second number. Most kernels take that long.
constexpr uint64_t kOneInLate = 16;
constexpr uint64_t kMostLate = 12;
// A block sleeps after so many polls for each thread that can go on: more would take the cores from those that it
// waits for.
constexpr uint32_t kPollsOfEach = 4;
// For how long: first and, while the block does nothing but poll, at most. No sched_yield instead: under load
// Linux 6.18 may not run a thread that yields again for seconds, and the deadlines of waits pass.
constexpr useconds_t kPollMicroseconds = 10;
constexpr useconds_t kLongestPollMicroseconds = 320;

uint32_t Count(uint32_t lanes) { return static_cast<uint32_t>(__builtin_popcount(lanes)); }

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
      warps_(grid.threads / kLanes) {
    fibers_.Reserve(grid.threads);
    current_block_ = this;
    NameRunningThreadBy(&RunningThread);
}

Block::~Block() { current_block_ = nullptr; }

void Block::ThreadMain() {
    (*Current().kernel_)();
    Current().MustHaveFollowed();
    Current().EndThread();
}

void Block::MustHaveFollowed() const {
    if (grid_.early && !threads_[thread_].has_followed) {
        Fail("a kernel that is launched early does not wait for the one before it: " + Where());
    }
}

void Block::Run(const std::function<void()>& kernel) {
    kernel_ = &kernel;
    alive_ = grid_.threads;
    for (uint32_t i = 0; i < grid_.threads; ++i) {
        fibers_[i].Prepare(&ThreadMain);
        ready_.push_back(i);
    }
    thread_ = PickReady();
    if (random_.OneIn(kOneInLate)) usleep(static_cast<useconds_t>(random_.Below(1ull << random_.Below(kMostLate))));
    fibers_.Enter(fibers_[thread_]);
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

// Switches straight to the next fiber: by way of the block, that would take twice as long.
void Block::SwitchOut() {
    const uint32_t left = thread_;
    if (ready_.empty()) Fail("no thread of the block can go on: " + WhereThreadsAre());
    stores_.Step();
    thread_ = PickReady();
    if (thread_ != left) fibers_[left].SwitchTo(fibers_[thread_]);
}

void Block::TakeTurns() {
    ready_.push_back(thread_);
    SwitchOut();
}

// The thread's kernel has returned: barriers and warp operations go on without it.
void Block::EndThread() {
    threads_[thread_].has_ended = true;
    Warp& warp = warps_[thread_ / kLanes];
    warp.live &= ~(1u << thread_ % kLanes);
    --alive_;
    stores_.MeetBlock(thread_);
    if (whole_.arrived != 0 && whole_.arrived == alive_) EndRound(whole_);
    EndRoundIfAllLiveWait(warp, kAllLanes, warp.of_all);
    for (auto& [mask, meeting] : warp.of_some) EndRoundIfAllLiveWait(warp, mask, meeting);
    fibers_[thread_].CheckCanary();
    if (alive_ == 0) fibers_.GoBack();
    SwitchOut();
}

void Block::EndRoundIfAllLiveWait(const Warp& warp, uint32_t mask, Meeting& meeting) {
    if (meeting.arrived != 0 && meeting.arrived == Count(mask & warp.live)) EndRound(meeting);
}

void Block::Arrive(Meeting& meeting, const char* operation) {
    if (meeting.arrived != 0 && meeting.operation != operation && std::strcmp(meeting.operation, operation) != 0) {
        Fail(std::string("threads that must meet are in ") + meeting.operation + " and " + operation);
    }
    meeting.operation = operation;
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

const WarpValues& Block::MeetWarp(const char* operation, uint32_t mask, uint64_t value) {
    Warp& warp = warps_[thread_ / kLanes];
    const uint32_t lane = thread_ % kLanes;
    if ((mask >> lane & 1) == 0) {
        Fail(std::string(operation) + " with a mask that does not name the calling lane");
    }
    MeetingOfWarp& meeting = mask == kAllLanes ? warp.of_all : warp.of_some[mask];
    stores_.MeetWarp(thread_);
    Arrive(meeting, operation);
    WarpValues& values = meeting.values[meeting.round % 2];
    if (meeting.arrived == 0) values.not_zero = 0;
    values.of[lane] = value;
    values.not_zero |= value != 0 ? 1u << lane : 0;
    const uint32_t all = mask & warp.live;
    EndRoundOrWait(meeting, all == kAllLanes ? kLanes : Count(all));
    return values;
}

uint32_t Block::MeetBlock(const char* operation, bool vote) {
    stores_.MeetBlock(thread_);
    Arrive(whole_, operation);
    uint32_t& votes = whole_.votes[whole_.round % 2];
    if (whole_.arrived == 0) votes = 0;
    votes += vote ? 1 : 0;
    EndRoundOrWait(whole_, alive_);
    return votes;
}

void Block::Poll() {
    if (++polls_ >= kPollsOfEach * (ready_.size() + 1)) {
        polls_ = 0;
        EndPollingRound();
    }
    TakeTurns();
}

// So many polls that the block has probably nothing else to do.
void Block::EndPollingRound() {
    stores_.LandSome();
    const uint64_t done = stores_.count() + alive_;
    sleep_ = done != done_ ? kPollMicroseconds : std::min(2 * sleep_, kLongestPollMicroseconds);
    done_ = done;
    usleep(sleep_);
    if (std::chrono::steady_clock::now() > grid_.deadline) {
        Fail("the kernel does not end: " + WhereThreadsAre());
    }
}

void Block::MayYield() {
    if (random_.OneIn(kOneInYields)) TakeTurns();
}

void Block::MayLinger() {
    if (random_.OneIn(kOneInLingers)) usleep(kLingerMicroseconds);
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
                                                               : std::string("wait at ") + thread.waits_at->operation;
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
