// How many tokens each rank has: one number for all ranks, or one each. A serving model has one
// token per request in a rank's batch, so ranks differ.
#pragma once

#include <string>
#include <vector>

namespace ep_bench {

// In rank order. The list on the command line may be shorter; FitToRanks extends it to all ranks.
using Tokens = std::vector<unsigned>;

// Parses the lists of --tokens and --sweep; sets *error if they are invalid.
Tokens ReadTokens(const std::string& list, std::string* error);
std::vector<Tokens> ReadSweep(const std::string& list, std::string* error);

// Returns a text if there are fewer or more numbers than the option allows, else an empty one. A single number holds
// for every rank. With `repeats_last`, as in a sweep, the last number holds for the remaining ranks.
std::string FitToRanks(unsigned ranks, bool repeats_last, Tokens* tokens);

unsigned Largest(const Tokens& tokens);

// The name as an item of --sweep; repetitions of the last number are left out: 128, 128/1, 1/2/128.
std::string NameOf(const Tokens& tokens);

}  // namespace ep_bench
