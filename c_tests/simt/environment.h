// The shim's settings are environment variables; README.md lists them.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <string>

#include "failure.h"

namespace simt {

// A setting that is a number; `otherwise` where the variable is not set.
inline uint64_t Setting(const char* name, uint64_t otherwise) {
    const char* text = std::getenv(name);
    if (text == nullptr) return otherwise;
    char* end = nullptr;
    const uint64_t value = std::strtoull(text, &end, 10);
    if (end == text || *end != '\0') Fail(std::string(name) + ": must be a number (got " + text + ")");
    return value;
}

}  // namespace simt
