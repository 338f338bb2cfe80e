// Judges every call of the fuzzer: its result, its text, its time, and whether all ranks got the same. It has its own
// counters, as threads may not use the harness's, and keeps the last calls for the report of a failure.
#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
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

// Whether a text is one line that names the function, as docs/errors.md promises.
inline bool IsText(const char* text, const char* function) {
    const size_t length = std::strlen(function);
    return std::strncmp(text, function, length) == 0 && std::strncmp(text + length, ": ", 2) == 0 &&
           text[length + 2] != '\0' && std::strchr(text, '\n') == nullptr;
}

class Referee {
   public:
    Referee(const Rules& rules, int rank, unsigned player) : rules_(rules), rank_(rank), player_(player) {}

    void BeginRound(uint64_t seed, unsigned round) {
        seed_ = seed;
        round_ = round;
        fingerprint_ = 0;
        num_history_ = 0;
        reported_ = false;
        lost_ = false;
    }

    // Makes the call and returns its result. `detail` describes its arguments.
    template <typename Call>
    ncclResult_t Judge(const char* function, const std::string& detail, unsigned codes, Call call) {
        Before(function, detail);
        const ncclResult_t result = call();
        After(codes, result);
        return result;
    }

    void Check(bool good, const std::string& what) {
        if (good) {
            ++passed_;
            return;
        }
        ++failed_;
        Report(what);
    }

    // Adds the round's counters to the harness's and clears them.
    void HandOverCounts() {
        ep_count(passed_, failed_);
        passed_ = 0;
        failed_ = 0;
    }

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
    static const char* Now(unsigned player) { return now_[player]; }

   private:
    void Before(const char* function, const std::string& detail) {
        function_ = function;
        std::snprintf(now_[player_], kLineBytes, "[rank %d] --seed %llu --only %u, player %u: %s %s", rank_,
                      static_cast<unsigned long long>(seed_), round_, player_, function, detail.c_str());
        if (rules_.verbose) std::fprintf(stderr, "%s\n", now_[player_]);
        history_[num_history_++ % kHistory] = std::string(function) + " " + detail;
        // Replaces the text, so that no refusal is checked by the text of the one before.
        (void)ncclEpGetVersion(nullptr);
        began_ = ep_seconds();
    }

    void After(unsigned codes, ncclResult_t result) {
        const double seconds = ep_seconds() - began_;
        const std::string text = result == ncclSuccess ? "" : ncclEpGetLastError();
        history_[(num_history_ - 1) % kHistory] += " -> " + std::to_string(result) + " " + text;
        if (rules_.verbose && result != ncclSuccess) {
            std::fprintf(stderr, "[rank %d]   -> %d %s\n", rank_, result, text.c_str());
        }
        ++calls_;
        if (result == ncclSuccess) ++accepted_;
        if (text.find("in an exchange of all ranks") != std::string::npos) lost_ = true;
        const uint64_t name = std::hash<std::string>()(function_);
        fingerprint_ = ep_mix(fingerprint_, static_cast<uint64_t>(result), name);
        Check(Permitted(codes, result), "result " + std::to_string(result));
        if (result != ncclSuccess) Check(IsText(text.c_str(), function_), "text \"" + text + "\"");
        Check(seconds <= rules_.limit_seconds, "took " + std::to_string(seconds) + " s");
        const cudaError_t left = cudaPeekAtLastError();
        Check(!strict() || left == cudaSuccess, std::string("leaves ") + cudaGetErrorName(left) + " behind");
    }

    bool Permitted(unsigned codes, ncclResult_t result) const {
        switch (result) {
            case ncclSuccess: return true;
            case ncclInvalidArgument: return (codes & kArgument) != 0;
            case ncclInvalidUsage: return (codes & kUsage) != 0;
            case ncclSystemError: return (codes & kSystem) != 0;
            case ncclUnhandledCudaError: return (codes & kCuda) != 0;
            case ncclRemoteError: return !strict();
            default: return false;
        }
    }

    void Report(const std::string& what) {
        constexpr uint64_t kPrinted = 5;
        if (failed_ > kPrinted) return;
        std::string text = "FAILED " + std::string(now_[player_]) + ": " + what + "\n";
        if (!reported_) {
            reported_ = true;
            const size_t first = num_history_ > kHistory ? num_history_ - kHistory : 0;
            text += "calls of this rank before it:\n";
            for (size_t i = first; i < num_history_; ++i) {
                text += "  " + std::to_string(i) + " " + history_[i % kHistory] + "\n";
            }
        }
        std::fputs(text.c_str(), stderr);
    }

    static constexpr size_t kHistory = 40;
    static constexpr size_t kLineBytes = 320;
    static inline char now_[kMaxPlayers][kLineBytes];
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
