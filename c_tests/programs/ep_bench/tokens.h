// How many tokens each rank has: one number for all ranks, or one each. A serving model has one
// token per request in a rank's batch, so ranks differ.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "harness/options.hpp"

namespace ep_bench {

// In rank order. The list on the command line may be shorter; FitToRanks extends it to all ranks.
using Tokens = std::vector<unsigned>;

inline unsigned Largest(const Tokens& tokens) { return *std::max_element(tokens.begin(), tokens.end()); }

// One count per rank. Some may be 0, but not all.
inline Tokens ReadNumbers(const char* option, const std::string& list, char separator, std::string* error) {
    Tokens tokens;
    for (const std::string& item : ep::Split(list, separator)) {
        ep::ReadUnsigned(option, item.c_str(), 0, &tokens.emplace_back(), error);
    }
    if (error->empty() && (tokens.empty() || Largest(tokens) == 0)) {
        *error = std::string(option) + ": expected a rank with tokens, got \"" + list + "\"";
    }
    return tokens;
}

// A..B: A and its doublings up to B.
inline void ReadDoubles(const std::string& range, size_t dots, std::vector<Tokens>* sweep, std::string* error) {
    unsigned first = 0;
    unsigned last = 0;
    ep::ReadUnsigned("--sweep", range.substr(0, dots).c_str(), 1, &first, error);
    ep::ReadUnsigned("--sweep", range.substr(dots + 2).c_str(), first, &last, error);
    if (!error->empty()) return;
    for (unsigned tokens = first; tokens <= last; tokens *= 2) sweep->push_back({tokens});
}

// Parses the lists of --tokens and --sweep; sets *error if they are invalid.
inline Tokens ReadTokens(const std::string& list, std::string* error) {
    return ReadNumbers("--tokens", list, ',', error);
}

inline std::vector<Tokens> ReadSweep(const std::string& list, std::string* error) {
    std::vector<Tokens> sweep;
    for (const std::string& item : ep::Split(list, ',')) {
        const size_t dots = item.find("..");
        if (dots == std::string::npos) {
            sweep.push_back(ReadNumbers("--sweep", item, '/', error));
        } else {
            ReadDoubles(item, dots, &sweep, error);
        }
    }
    if (error->empty() && sweep.empty()) *error = "--sweep: expected numbers, got none";
    return sweep;
}

// Returns a text if there are fewer or more numbers than the option allows, else an empty one. A single number holds
// for every rank. With `repeats_last`, as in a sweep, the last number holds for the remaining ranks.
inline std::string FitToRanks(unsigned ranks, bool repeats_last, Tokens* tokens) {
    const size_t given = tokens->size();
    if (given > ranks || (given > 1 && given < ranks && !repeats_last)) {
        return (repeats_last ? "--sweep: expected at most " : "--tokens: expected 1 number or ") +
               std::to_string(ranks) + ", as many as there are ranks, got " + std::to_string(given);
    }
    const unsigned last = tokens->back();
    tokens->resize(ranks, last);
    return "";
}

// The name as an item of --sweep; repetitions of the last number are left out: 128, 128/1, 1/2/128.
inline std::string NameOf(const Tokens& tokens) {
    size_t numbers = tokens.size();
    while (numbers > 1 && tokens[numbers - 2] == tokens.back()) --numbers;
    std::string name;
    for (size_t rank = 0; rank < numbers; ++rank) name += (rank == 0 ? "" : "/") + std::to_string(tokens[rank]);
    return name;
}

}  // namespace ep_bench
