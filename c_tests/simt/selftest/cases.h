// A case of the shim's own test: small kernels that obey a rule, or break it.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace simt_selftest {

enum class Wanted {
    kRight,    // every seed gives true
    kWrong,    // some seed gives false: the shim shows the mistake
    kRefused,  // the process ends with `text` on stderr
    kFaults,   // the process ends by a fault of memory
};

struct Case {
    const char* name;
    Wanted wanted;
    // Runs kernels with schedules that follow from the seed; true if the result is right.
    std::function<bool(uint64_t seed)> run;
    const char* text = "";
};

std::vector<Case> ThreadCases();
std::vector<Case> MemoryCases();
std::vector<Case> BulkCases();
std::vector<Case> KernelCases();

}  // namespace simt_selftest
