// What the shim does about a kernel that breaks a rule of CUDA: one line that says which, and the
// process ends. Nothing after that would mean anything.
#pragma once

#include <string>

namespace simt {

// Prints "simt: `text`" on stderr, with the block and thread that runs, if one does, and aborts.
[[noreturn]] void Fail(const std::string& text);

// `name` gives the block and thread that the calling OS thread runs; an empty text if it runs none.
void NameRunningThreadBy(std::string (*name)());

}  // namespace simt
