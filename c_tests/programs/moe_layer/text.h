// The text that moe_layer takes its tokens from.
//
// Knows files and words, but neither the model nor NCCL EP.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moe {

// The text shipped beside the programs, found relative to the running executable
// (target/c/<kind>/moe_layer) or else to the working directory.
std::string DefaultTextPath();

// The whole file, or an empty string if it cannot be read.
std::string ReadTextFile(const std::string& path);

// Splits a text into words (letters, digits, apostrophes; lower case) and punctuation marks, and
// returns one id per token: the 64-bit FNV-1a hash of its spelling. Equal words get equal ids.
std::vector<uint64_t> Tokenise(const std::string& text);

}  // namespace moe
