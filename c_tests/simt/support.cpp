#include "support.h"

#include <unistd.h>

#include <atomic>
#include <cstdlib>

namespace simt {
namespace {

std::string Nothing() { return ""; }

std::atomic<std::string (*)()> name_running_thread{&Nothing};

}  // namespace

void NameRunningThreadBy(std::string (*name)()) { name_running_thread = name; }

void Fail(const std::string& text) {
    const std::string where = name_running_thread.load()();
    // One write, so that lines of several ranks do not mix; stdio's locks stay out of fibers.
    const std::string line = "simt: " + text + (where.empty() ? "" : " (" + where + ")") + "\n";
    const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
    (void)written;  // the process ends, whether it was written or not
    abort();
}

}  // namespace simt
