// Values in the form of a file of --json.
#pragma once

#include <cstdio>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "programs/ep_bench/stats.h"

namespace ep_bench {

// A value in the form of the file. The functions are members, so that each finds those below it by their types.
struct Json {
    std::string text;
};

inline Json To(const Json& json) { return json; }

// Names from drivers and from us contain no control characters.
inline Json To(const std::string& text) {
    if (text.empty()) return {"null"};
    std::string json = "\"";
    for (const char character : text) {
        if (character == '"' || character == '\\') json += '\\';
        json += character;
    }
    return {json + "\""};
}

inline Json To(const char* text) { return To(std::string(text)); }

template <typename Number, typename = std::enable_if_t<std::is_arithmetic_v<Number>>>
Json To(Number number) {
    if constexpr (std::is_same_v<Number, bool>) return {number ? "true" : "false"};
    char text[64];
    snprintf(text, sizeof(text), "%.10g", static_cast<double>(number));
    return {text};
}

template <typename Value>
Json To(const std::optional<Value>& value) {
    return value ? To(*value) : Json{"null"};
}

inline Json To(const std::vector<unsigned>& numbers) {
    std::string json;
    for (const unsigned number : numbers) json += (json.empty() ? "[" : ", ") + To(number).text;
    return {json + "]"};
}

template <typename Value>
Json To(const std::map<std::string, Value>& values) {
    std::string json;
    for (const auto& [name, value] : values) {
        json += (json.empty() ? "{" : ", ") + To(name).text + ": " + To(value).text;
    }
    return {json + "}"};
}

inline std::string Members() { return "}"; }

template <typename Value, typename... More>
std::string Members(const char* name, const Value& value, const More&... more) {
    return "\"" + std::string(name) + "\": " + To(value).text + (sizeof...(more) > 0 ? ", " : "") + Members(more...);
}

// Takes names and values in turn.
template <typename... All>
Json Object(const All&... members) {
    return {"{" + Members(members...)};
}

template <typename Value>
std::optional<Value> If(bool has, Value value) {
    return has ? std::optional<Value>(value) : std::nullopt;
}

inline Json To(const Figures& figures) {
    return Object("median_us", figures.median_us, "min_us", figures.min_us, "p90_us", figures.p90_us, "p99_us",
                  figures.p99_us);
}

}  // namespace ep_bench
