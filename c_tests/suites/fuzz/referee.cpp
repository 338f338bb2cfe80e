#include "suites/fuzz/referee.h"

#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>

namespace test_fuzz {
namespace {

constexpr size_t kLineBytes = 320;
char g_now[Referee::kMaxPlayers][kLineBytes];

double Seconds() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double>(now).count();
}

// Whether a text is one line that names the function, as docs/errors.md promises.
bool IsText(const char* text, const char* function) {
    const size_t length = std::strlen(function);
    return std::strncmp(text, function, length) == 0 && std::strncmp(text + length, ": ", 2) == 0 &&
           text[length + 2] != '\0' && std::strchr(text, '\n') == nullptr;
}

}  // namespace

Referee::Referee(const Rules& rules, int rank, unsigned player) : rules_(rules), rank_(rank), player_(player) {}

const char* Referee::Now(unsigned player) { return g_now[player]; }

void Referee::BeginRound(uint64_t seed, unsigned round) {
    seed_ = seed;
    round_ = round;
    fingerprint_ = 0;
    num_history_ = 0;
    reported_ = false;
    lost_ = false;
}

void Referee::Before(const char* function, const std::string& detail) {
    function_ = function;
    std::snprintf(g_now[player_], kLineBytes, "[rank %d] --seed %llu --only %u, player %u: %s %s", rank_,
                  static_cast<unsigned long long>(seed_), round_, player_, function, detail.c_str());
    if (rules_.verbose) std::fprintf(stderr, "%s\n", g_now[player_]);
    history_[num_history_++ % kHistory] = std::string(function) + " " + detail;
    // Replaces the text, so that no refusal is checked by the text of the one before.
    (void)ncclEpGetVersion(nullptr);
    began_ = Seconds();
}

bool Referee::Permitted(unsigned codes, ncclResult_t result) const {
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

void Referee::After(unsigned codes, ncclResult_t result) {
    const double seconds = Seconds() - began_;
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

void Referee::Check(bool good, const std::string& what) {
    if (good) {
        ++passed_;
        return;
    }
    ++failed_;
    Report(what);
}

void Referee::Report(const std::string& what) {
    constexpr uint64_t kPrinted = 5;
    if (failed_ > kPrinted) return;
    std::string text = "FAILED " + std::string(g_now[player_]) + ": " + what + "\n";
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

void Referee::HandOverCounts() {
    ep_count(passed_, failed_);
    passed_ = 0;
    failed_ = 0;
}

}  // namespace test_fuzz
