// Command-line numbers for the C++ programs: the whole text must be a number in the given range.
#ifndef C_TESTS_HARNESS_OPTIONS_HPP_
#define C_TESTS_HARNESS_OPTIONS_HPP_

#include <charconv>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

namespace ep {

inline std::optional<unsigned> ParseUnsigned(std::string_view text, unsigned lowest,
                                             unsigned highest) {
    unsigned value = 0;
    const char* end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, value);
    const bool valid = error == std::errc() && rest == end && value >= lowest && value <= highest;
    return valid ? std::optional<unsigned>(value) : std::nullopt;
}

// Stores the number in *value, or a text that names the option in *error.
inline void ReadUnsigned(const char* option, const char* text, unsigned lowest, unsigned* value,
                         std::string* error) {
    constexpr unsigned kHighest = 1u << 30;
    if (const auto parsed = ParseUnsigned(text, lowest, kHighest)) {
        *value = *parsed;
    } else {
        *error = std::string(option) + ": expected a whole number of at least " +
                 std::to_string(lowest) + ", got \"" + text + "\"";
    }
}

}  // namespace ep

#endif  // C_TESTS_HARNESS_OPTIONS_HPP_
