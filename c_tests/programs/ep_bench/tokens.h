// How many tokens each rank has: one number for all of them, or one for each. A model that serves
// requests has as many tokens in a rank's batch as that rank has requests, so ranks differ.
#ifndef C_TESTS_PROGRAMS_EP_BENCH_TOKENS_H_
#define C_TESTS_PROGRAMS_EP_BENCH_TOKENS_H_

#include <string>
#include <vector>

namespace ep_bench {

// In rank order. On the command line the list may be shorter; FitToRanks makes it one for each.
using Tokens = std::vector<unsigned>;

// The lists of --tokens and --sweep; a text in *error if they are none.
Tokens ReadTokens(const std::string& list, std::string* error);
std::vector<Tokens> ReadSweep(const std::string& list, std::string* error);

// A text if there are fewer or more numbers than the option allows, else empty. A single number is
// that of every rank. With `repeats_last`, as in a sweep, so is the last of several for the rest.
std::string FitToRanks(unsigned ranks, bool repeats_last, Tokens* tokens);

unsigned Largest(const Tokens& tokens);

// As an item of --sweep, with no number repeated that the last one stands for: 128, 128/1, 1/2/128.
std::string NameOf(const Tokens& tokens);

}  // namespace ep_bench

#endif  // C_TESTS_PROGRAMS_EP_BENCH_TOKENS_H_
