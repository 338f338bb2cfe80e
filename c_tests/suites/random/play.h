// Runs a random configuration: operations in a random order on its handles; all outputs are
// compared with the reference.
#pragma once

#include <functional>
#include <string>

#include "suites/random/config.h"

namespace test_random {

// Chooses the next step. `Shared` choices are equal on all ranks; delays are each rank's own.
class Course {
   public:
    Course(const EpEnv& env, const Config& config);
    unsigned Shared(unsigned bound);
    bool OneIn(unsigned n) { return Shared(n) == 0; }
    uint64_t SharedSeed();
    void MaybeDelay();
    // Calls `enqueue`, which gives work to the stream of the environment; or captures it, and launches
    // the graph once or twice.
    void Enqueue(const std::function<void()>& enqueue);
    // A format for the dispatches to come, where another one is due; it is noted.
    bool NewFormat(const Config& config, size_t handle, RefFormat* format);
    // Adds a line to the history that is printed when something differs.
    void Note(const char* what, size_t handle);
    const std::string& history() const { return history_; }

   private:
    const EpEnv& env_;
    bool delays_;
    bool graphs_;
    uint64_t shared_;
    uint64_t own_;
    std::string history_;
};

// Returns the operations that ran, in order.
std::string PlayAll(const EpEnv& env, ncclEpGroup_t group, const Config& config);

}  // namespace test_random
