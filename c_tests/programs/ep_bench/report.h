// The text that ep_bench prints and the file that --json writes; process 0 only.
#ifndef C_TESTS_PROGRAMS_EP_BENCH_REPORT_H_
#define C_TESTS_PROGRAMS_EP_BENCH_REPORT_H_

#include <vector>

#include "programs/ep_bench/machine.h"
#include "programs/ep_bench/options.h"
#include "programs/ep_bench/result.h"

namespace ep_bench {

void PrintHeader(const Options& options, int ranks, bool on_hostsim);
void PrintResult(const Options& options, const Result& result);
void PrintTable(const Options& options, const std::vector<Result>& results);

// False if the file could not be written.
bool WriteJson(const Options& options, const Machine& machine, int ranks,
               const std::vector<Result>& results);

}  // namespace ep_bench

#endif  // C_TESTS_PROGRAMS_EP_BENCH_REPORT_H_
