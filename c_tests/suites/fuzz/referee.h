// Judges every call of the fuzzer: its result, its text, its time, and whether all ranks got the same. It has its own
// counters, as threads may not use the harness's, and keeps the last calls for the report of a failure.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "harness/harness.h"

namespace test_fuzz {

// What a refused call may return; where ranks disagree, also ncclRemoteError.
enum Codes : unsigned {
    kArgument = 1,
    kUsage = 2,
    kSystem = 4,
    kCuda = 8,
};

struct Rules {
    bool agree;            // all ranks make the same calls
    double limit_seconds;  // of a call
    bool verbose;
};

class Referee {
   public:
    Referee(const Rules& rules, int rank, unsigned player);

    void BeginRound(uint64_t seed, unsigned round);

    // Makes the call and returns its result. `detail` describes its arguments.
    template <typename Call>
    ncclResult_t Judge(const char* function, const std::string& detail, unsigned codes, Call call) {
        Before(function, detail);
        const ncclResult_t result = call();
        After(codes, result);
        return result;
    }
    void Check(bool good, const std::string& what);

    // Adds the round's counters to the harness's and clears them.
    void HandOverCounts();
    // Hash of the round's calls and results; equal on all ranks in `agree`.
    uint64_t fingerprint() const { return fingerprint_; }
    uint64_t calls() const { return calls_; }
    uint64_t accepted() const { return accepted_; }
    // A text of this round said that ranks were missing in an exchange over NCCL: the communicator
    // cannot be used any more.
    bool lost() const { return lost_; }
    // While set, all ranks make the same calls even in `differ`.
    void set_strict(bool strict) { strict_ = strict; }
    bool strict() const { return strict_ || rules_.agree; }

    // The current call, for a signal handler.
    static constexpr unsigned kMaxPlayers = 4;
    static const char* Now(unsigned player);

   private:
    void Before(const char* function, const std::string& detail);
    void After(unsigned codes, ncclResult_t result);
    bool Permitted(unsigned codes, ncclResult_t result) const;
    void Report(const std::string& what);

    static constexpr size_t kHistory = 40;
    Rules rules_;
    int rank_;
    unsigned player_;
    uint64_t seed_ = 0;
    unsigned round_ = 0;
    const char* function_ = "";
    double began_ = 0;
    uint64_t fingerprint_ = 0;
    uint64_t calls_ = 0, accepted_ = 0;
    uint64_t passed_ = 0, failed_ = 0;
    bool lost_ = false;
    bool strict_ = false;
    bool reported_ = false;  // in this round
    std::array<std::string, kHistory> history_;
    size_t num_history_ = 0;
};

}  // namespace test_fuzz
