// The text that ep_bench prints and the file that --json writes; process 0 only.
#pragma once

#include <vector>

#include "programs/ep_bench/machine.h"
#include "programs/ep_bench/options.h"
#include "programs/ep_bench/result.h"

namespace ep_bench {

void PrintHeader(const Options& options, int ranks, bool on_hostsim);
void PrintResult(const Options& options, const Result& result);
void PrintFirstUse(double bytes);
void PrintTable(const Options& options, const std::vector<Result>& results);

// All that one process measured.
struct Measurements {
    const std::vector<Result>& results;
    double first_use_bytes;  // of process 0: what its first group left behind
};

// False if the file could not be written.
bool WriteJson(const Options& options, const Machine& machine, int ranks, const Measurements& measured);

}  // namespace ep_bench
