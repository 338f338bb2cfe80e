// Command lines of the C++ programs: a table with one row for each option.
#pragma once

#include <getopt.h>
#include <nccl_ep.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <functional>
#include <numeric>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "harness/base.h"

namespace ep {

inline std::optional<unsigned> ParseUnsigned(std::string_view text, unsigned lowest, unsigned highest) {
    unsigned value = 0;
    const char* end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, value);
    const bool valid = error == std::errc() && rest == end && value >= lowest && value <= highest;
    return valid ? std::optional<unsigned>(value) : std::nullopt;
}

// Stores the number in *value, or a text that names the option in *error. The whole text must be a
// number of at least `lowest`.
inline void ReadUnsigned(const char* option, const char* text, unsigned lowest, unsigned* value, std::string* error) {
    constexpr unsigned kHighest = 1u << 30;
    if (const auto parsed = ParseUnsigned(text, lowest, kHighest)) {
        *value = *parsed;
    } else {
        *error = std::string(option) + ": expected a whole number of at least " + std::to_string(lowest) + ", got \"" +
                 text + "\"";
    }
}

// Drops an empty last item: "1," is the list "1".
inline std::vector<std::string> Split(const std::string& list, char separator) {
    std::vector<std::string> items;
    std::istringstream stream(list);
    for (std::string item; std::getline(stream, item, separator);) items.push_back(item);
    return items;
}

// One option. `read` gets the value, or "" if the option takes none, and returns why it refuses it.
struct Option {
    char letter;  // 0: the long name only
    const char* name;
    bool takes_value;
    std::function<std::string(const std::string& value)> read;
};

inline Option Number(char letter, const char* name, unsigned lowest, unsigned* number) {
    return {letter, name, true, [=](const std::string& value) {
                std::string error;
                ReadUnsigned(("--" + std::string(name)).c_str(), value.c_str(), lowest, number, &error);
                return error;
            }};
}

inline Option Switch(char letter, const char* name, bool* is_on) {
    return {letter, name, false, [=](const std::string&) {
                *is_on = true;
                return std::string();
            }};
}

inline Option Text(char letter, const char* name, std::string* text) {
    return {letter, name, true, [=](const std::string& value) {
                *text = value;
                return std::string();
            }};
}

// One of these words.
inline Option Choice(char letter, const char* name, const std::vector<std::string>& words,
                     const std::function<void(const std::string& word)>& choose) {
    return {letter, name, true, [=](const std::string& value) {
                if (std::find(words.begin(), words.end(), value) != words.end()) {
                    choose(value);
                    return std::string();
                }
                std::string expected = words.front();
                for (size_t i = 1; i < words.size(); ++i) expected += (i + 1 < words.size() ? ", " : " or ") + words[i];
                return "--" + std::string(name) + ": expected " + expected + ", got \"" + value + "\"";
            }};
}

// The mode of the library, by its short or its long name.
inline Option Algorithm(ncclEpAlgorithm_t* algorithm) {
    return {'a', "algorithm", true, [=](const std::string& value) {
                const bool ll = value == "ll" || value == "low-latency";
                const bool ht = value == "ht" || value == "high-throughput";
                if (ll) *algorithm = NCCL_EP_ALGO_LOW_LATENCY;
                if (ht) *algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
                return ll || ht ? "" : "--algorithm: expected ll or ht, got \"" + value + "\"";
            }};
}

constexpr int kFirstNumber = 256;  // of long options for getopt, behind all letters

// How many characters must be put in, left out or replaced to make one word of another.
inline size_t EditDistance(std::string_view from, std::string_view to) {
    std::vector<size_t> row(to.size() + 1);
    std::iota(row.begin(), row.end(), size_t{0});
    for (size_t i = 0; i < from.size(); ++i) {
        size_t diagonal = std::exchange(row[0], i + 1);
        for (size_t j = 0; j < to.size(); ++j) {
            const size_t replaced = diagonal + (from[i] == to[j] ? 0 : 1);
            diagonal = row[j + 1];
            row[j + 1] = std::min({replaced, row[j] + 1, diagonal + 1});
        }
    }
    return row.back();
}

// ", did you mean --tokens?" for an unknown long option that is almost one of the table or begins as one does; else "".
inline std::string Hint(std::string_view word, const std::vector<Option>& table) {
    if (word.substr(0, 2) != "--") return "";
    const std::string_view name = word.substr(2, word.find('=') - 2);
    size_t least = 2 + name.size() / 4;
    std::string hint;
    for (const Option& entry : table) {
        const std::string_view known = entry.name;
        const bool begins = !name.empty() && known.substr(0, name.size()) == name;
        const size_t distance = begins ? 1 : EditDistance(name, known);
        if (distance >= least) continue;
        least = distance;
        hint = ", did you mean --" + std::string(known) + "?";
    }
    return hint;
}

// Why getopt, which has just returned `found`, does not like a word.
inline std::string RefuseWord(int found, char** argv, const std::vector<Option>& table) {
    std::string name;
    if (optopt >= kFirstNumber) {
        name = std::string("--") + table[static_cast<size_t>(optopt - kFirstNumber)].name;
    } else if (optopt != 0) {
        name = std::string("-") + static_cast<char>(optopt);
    }
    if (found == ':') return name + ": needs a value";
    if (optopt >= kFirstNumber) return name + ": takes no value";
    const std::string word = name.empty() ? argv[optind - 1] : name;
    return "unknown option \"" + word + "\"" + Hint(word, table);
}

// Reads a command line; returns why it is refused, or "". Nothing is printed: one process of many does that.
inline std::string ParseOptions(int argc, char** argv, const std::vector<Option>& table) {
    std::string letters = ":";  // tells options without their value from unknown ones
    std::vector<option> names;
    for (const Option& entry : table) {
        const int has_value = entry.takes_value ? required_argument : no_argument;
        names.push_back({entry.name, has_value, nullptr, kFirstNumber + static_cast<int>(names.size())});
        if (entry.letter == 0) continue;
        letters += entry.letter;
        if (entry.takes_value) letters += ':';
    }
    names.push_back({nullptr, 0, nullptr, 0});
    opterr = 0;
    int found;
    while ((found = getopt_long(argc, argv, letters.c_str(), names.data(), nullptr)) != -1) {
        const Option* chosen = nullptr;
        for (size_t i = 0; i < table.size(); ++i) {
            const bool by_name = found == kFirstNumber + static_cast<int>(i);
            if (by_name || (table[i].letter != 0 && found == table[i].letter)) chosen = &table[i];
        }
        if (chosen == nullptr) return RefuseWord(found, argv, table);
        const std::string refusal = chosen->read(optarg != nullptr ? optarg : "");
        if (!refusal.empty()) return refusal;
    }
    if (optind < argc) return std::string("unexpected argument \"") + argv[optind] + "\"";
    return "";
}

// Says why a command line is refused, and who explains the options.
inline void PrintRefusal(const char* program, const std::string& refusal) {
    std::fprintf(stderr, "%s: %s\nSee %s --help.\n", program, refusal.c_str(), program);
}

}  // namespace ep
