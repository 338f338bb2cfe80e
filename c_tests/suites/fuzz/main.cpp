// A fuzzer of the C interface: random calls with valid and invalid arguments on objects that are
// alive, destroyed or never existed. No call may crash, hang or abort; a refused call may write
// nothing, and every refusal has a documented code and a text.
//
//   test_fuzz [agree | differ] [--calls N] [--seed S] [--seconds N] [--threads N] [--own PERCENT]
//             [--creation 0|1] [--only ROUND] [--verbose 1]
//
// agree    all ranks make the same calls, so accepted calls must also succeed
// differ   each rank draws some calls alone, with a deadline of 250 ms: operations and their groups
//          then fail, but no call takes long, and a new group works
//
// The seed and the number of the round, which a failure, a crash and a hang print, determine everything; `--only`
// repeats one round. Each thread has its own communicator, streams and groups. With `--creation 0`, groups are created
// and destroyed between rounds only; so are HT handles where ranks differ.
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "harness/nodes.h"
#include "harness/options.hpp"
#include "suites/fuzz/player.h"

namespace test_fuzz {
namespace {

constexpr unsigned kCallsOfARound = 150;
// Where ranks differ, groups fail soon.
constexpr unsigned kCallsWhereRanksDiffer = 70;
constexpr const char* kLongTimeout = "30000";
constexpr const char* kShortTimeout = "250";

// Returns what is wrong.
std::string ReadOptions(int argc, char** argv, Options* options) {
    const std::string word = argc > 1 ? argv[1] : "";
    const int has_word = word == "agree" || word == "differ" ? 1 : 0;
    options->agree = word != "differ";
    const std::string error = ep::ParseOptions(
        argc - has_word, argv + has_word,
        {ep::Number(0, "calls", 1, &options->calls), ep::Number(0, "seed", 0, &options->seed),
         ep::Number(0, "seconds", 0, &options->seconds), ep::Number(0, "threads", 1, &options->threads),
         ep::Number(0, "own", 0, &options->own_percent), ep::Number(0, "creation", 0, &options->creation),
         ep::Number(0, "only", 1, &options->only), ep::Number(0, "verbose", 0, &options->verbose)});
    const bool many = options->threads > Referee::kMaxPlayers || (options->threads > 1 && !options->agree);
    return error.empty() && many ? "--threads: at most 4, and only where ranks agree" : error;
}

// Prints the current call; the signal's default action does the rest.
void OnCrash(int signal_number) {
    for (unsigned player = 0; player < Referee::kMaxPlayers; ++player) {
        const char* now = Referee::Now(player);
        if (now[0] == '\0') continue;
        const char* const parts[] = {"\ncrashed: ", now, "\n"};
        for (const char* part : parts) {
            if (write(STDERR_FILENO, part, std::strlen(part)) < 0) break;
        }
    }
    std::signal(signal_number, SIG_DFL);
    std::raise(signal_number);
}

bool Anywhere(bool here) {
    int mine = here ? 1 : 0;
    int all = 0;
    MPI_Allreduce(&mine, &all, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    return all != 0;
}

class Game {
   public:
    Game(const EpEnv& env, const Options& options) : env_(env), options_(options) {
        const bool has_ht = ep_has_high_throughput(&env);
        for (unsigned i = 0; i < options.threads; ++i) {
            comms_.push_back(ep_new_comm(&env));
            const Seat seat{env.rank, env.size, i, comms_[i], has_ht};
            players_.push_back(std::make_unique<Player>(options, seat));
        }
    }

    void Run() {
        const double end = MPI_Wtime() + options_.seconds;
        unsigned round = options_.only != 0 ? options_.only : 1;
        bool over = false;
        while (!over) {
            Round(round++);
            const bool late = options_.seconds != 0 && MPI_Wtime() >= end;
            const bool enough = players_[0]->referee().calls() >= options_.calls;
            over = options_.only != 0 || Anywhere(ep_failed() > 0 || late || (options_.seconds == 0 && enough));
        }
        Count();
        players_.clear();
        for (ncclComm_t comm : comms_) EP_CHECK_NCCL(ncclCommDestroy(comm));
    }

   private:
    void Round(unsigned round) {
        static char place[64];
        std::snprintf(place, sizeof(place), "--seed %u --only %u", options_.seed, round);
        ep_watchdog_at_case(place);
        ep_watchdog_arm(&env_, ep_watchdog_default(120));
        SetEnvironment(round, options_.agree);
        // Where ranks differ, they wait for each other only for a short time.
        ep_barrier();
        for (auto& player : players_) player->Open(round);
        PlayAll();
        ep_barrier();
        for (auto& player : players_) player->Close();
        if (Anywhere(players_[0]->referee().lost())) Replace();
        for (auto& player : players_) player->DestroyTensors();
        if (options_.agree) CompareRanks();
        SetEnvironment(round, true);
        for (auto& player : players_) {
            if (!options_.agree) player->ExpectRoundTrip();
            player->referee().HandOverCounts();
        }
    }

    void PlayAll() {
        std::vector<std::thread> threads;
        for (size_t i = 1; i < players_.size(); ++i) {
            threads.emplace_back([this, i] {
                EP_REQUIRE_CUDA(cudaSetDevice(env_.device));
                players_[i]->Play(kCallsOfARound);
            });
        }
        players_[0]->Play(options_.agree ? kCallsOfARound : kCallsWhereRanksDiffer);
        for (std::thread& thread : threads) thread.join();
    }

    // Groups read the environment when they are created; threads must not set it.
    void SetEnvironment(unsigned round, bool patient) {
        const bool exact = ep_num_nodes() == 1 && ep_mix(options_.seed, round, 5) % 3 == 0;
        setenv("NCCL_EP_LL_COMBINE", exact ? "exact" : "reduce", 1);
        setenv("NCCL_EP_TIMEOUT_MS", patient ? kLongTimeout : kShortTimeout, 1);
    }

    // All ranks must have made the same calls with the same results.
    void CompareRanks() {
        for (auto& player : players_) {
            const uint64_t mine = player->referee().fingerprint();
            uint64_t first = mine;
            MPI_Bcast(&first, 1, MPI_UINT64_T, 0, MPI_COMM_WORLD);
            player->referee().Check(mine == first, "other results than on rank 0");
        }
    }

    // Replaces the communicator in which ranks were missing.
    void Replace() {
        EP_CHECK_NCCL(ncclCommAbort(comms_[0]));
        // The stuck exchange has left its error on the streams.
        (void)cudaDeviceSynchronize();
        (void)cudaGetLastError();
        comms_[0] = ep_new_comm(&env_);
        players_[0]->set_comm(comms_[0]);
        ++replaced_;
    }

    void Count() {
        uint64_t mine[2] = {0, 0};
        uint64_t all[2] = {0, 0};
        for (auto& player : players_) {
            mine[0] += player->referee().calls();
            mine[1] += player->referee().accepted();
        }
        MPI_Reduce(mine, all, 2, MPI_UINT64_T, MPI_SUM, 0, MPI_COMM_WORLD);
        if (env_.rank != 0) return;
        std::printf("%llu calls of seed %u, %llu accepted, %u communicators lost\n",
                    static_cast<unsigned long long>(all[0]), options_.seed, static_cast<unsigned long long>(all[1]),
                    replaced_);
    }

    EpEnv env_;
    Options options_;
    std::vector<ncclComm_t> comms_;
    std::vector<std::unique_ptr<Player>> players_;
    unsigned replaced_ = 0;
};

}  // namespace
}  // namespace test_fuzz

int main(int argc, char** argv) {
    EpEnv env;
    ep_init(&env, &argc, &argv);
    test_fuzz::Options options;
    const std::string error = test_fuzz::ReadOptions(argc, argv, &options);
    if (!error.empty()) {
        if (env.rank == 0) std::fprintf(stderr, "%s\n", error.c_str());
        ep_release(&env);
        return 2;
    }
    for (const int signal_number : {SIGSEGV, SIGBUS, SIGABRT, SIGILL, SIGFPE}) {
        std::signal(signal_number, test_fuzz::OnCrash);
    }
    test_fuzz::Game(env, options).Run();
    return ep_finish(&env);
}
