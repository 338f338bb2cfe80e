// Shows that the SIMT shim runs right kernels rightly and lets wrong ones fail. Each case runs in a
// process of its own, since a refusal ends it. Ends with "N passed, N failed".
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "cases.h"

namespace simt_selftest {
namespace {

constexpr uint64_t kSeeds = 60;
constexpr unsigned kMostSeconds = 30;

struct Ending {
    int status;
    std::string said;
};

constexpr int kAllRight = 10;
constexpr int kSomeWrong = 11;

[[noreturn]] void RunAllSeeds(const Case& test) {
    bool right = true;
    for (uint64_t seed = 0; seed < kSeeds && right; ++seed) right = test.run(seed);
    _exit(right ? kAllRight : kSomeWrong);
}

Ending InOwnProcess(const Case& test) {
    int pipe_ends[2];
    if (pipe(pipe_ends) != 0) std::abort();
    const pid_t child = fork();
    if (child == 0) {
        dup2(pipe_ends[1], STDERR_FILENO);
        close(pipe_ends[0]);
        alarm(kMostSeconds);
        RunAllSeeds(test);
    }
    close(pipe_ends[1]);
    Ending ending = {};
    char buffer[512];
    ssize_t got;
    while ((got = read(pipe_ends[0], buffer, sizeof(buffer))) > 0) {
        ending.said.append(buffer, static_cast<size_t>(got));
    }
    close(pipe_ends[0]);
    waitpid(child, &ending.status, 0);
    return ending;
}

bool EndedBy(const Ending& ending, int signal) {
    return WIFSIGNALED(ending.status) && WTERMSIG(ending.status) == signal;
}

bool EndedWith(const Ending& ending, int code) {
    return WIFEXITED(ending.status) && WEXITSTATUS(ending.status) == code;
}

bool IsAsWanted(const Case& test, const Ending& ending) {
    switch (test.wanted) {
        case Wanted::kRight: return EndedWith(ending, kAllRight);
        case Wanted::kWrong: return EndedWith(ending, kSomeWrong);
        case Wanted::kRefused: return EndedBy(ending, SIGABRT) && ending.said.find(test.text) != std::string::npos;
        case Wanted::kFaults: return EndedBy(ending, SIGSEGV);
    }
    return false;
}

int Main() {
    // So that the case that waits for its end does not take a minute.
    setenv("NCCLEP_SIMT_HANG_SECONDS", "1", 1);
    unsigned passed = 0;
    unsigned failed = 0;
    for (const auto& cases : {ThreadCases(), MemoryCases(), BulkCases(), KernelCases()}) {
        for (const Case& test : cases) {
            std::fflush(stdout);
            const Ending ending = InOwnProcess(test);
            const bool good = IsAsWanted(test, ending);
            (good ? passed : failed) += 1;
            std::printf("%-40s %s\n", test.name, good ? "ok" : "FAILED");
            if (!good) std::printf("  status %x, said: %s\n", ending.status, ending.said.c_str());
        }
    }
    std::printf("%u passed, %u failed\n", passed, failed);
    return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace simt_selftest

int main() { return simt_selftest::Main(); }
