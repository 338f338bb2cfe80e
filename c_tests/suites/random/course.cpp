// The choices of a configuration, drawn along the way, and the history of its operations; see play.h.
#include <unistd.h>

#include "harness/graphs.h"
#include "suites/random/play.h"

namespace test_random {

Course::Course(const EpEnv& env, const Config& config)
    : env_(env),
      delays_(config.delays),
      graphs_(config.graphs),
      shared_(ep_mix(config.seed, config.index, 3)),
      own_(ep_mix(config.seed, config.index, 4 + static_cast<uint64_t>(env.rank))) {}

unsigned Course::Shared(unsigned bound) { return static_cast<unsigned>(ep_random_below(&shared_, bound)); }

uint64_t Course::SharedSeed() { return ep_random(&shared_); }

void Course::MaybeDelay() {
    constexpr unsigned kOneIn = 4;
    constexpr unsigned kMostMicroseconds = 400;
    if (!delays_ || ep_random_below(&own_, kOneIn) != 0) return;
    usleep(static_cast<useconds_t>(ep_random_below(&own_, kMostMicroseconds)));
}

void Course::Enqueue(const std::function<void()>& enqueue) {
    if (!graphs_ || !ep_begin_capture(env_.stream)) return enqueue();
    enqueue();
    const cudaGraphExec_t graph = ep_instantiate(ep_end_capture(env_.stream));
    const unsigned launches = 1 + Shared(2);
    Note("in a graph, launches:", launches);
    for (unsigned i = 0; i < launches; ++i) EP_CHECK_CUDA(cudaGraphLaunch(graph, env_.stream));
    EP_CHECK_CUDA(cudaGraphExecDestroy(graph));
}

bool Course::NewFormat(const Config& config, size_t handle, RefFormat* format) {
    if (!OneIn(2)) return false;
    *format = ref_format_draw(SharedSeed(), config.group.row_bytes);
    char name[256];
    ref_format_name(format, name, sizeof(name));
    Note(name, handle);
    return true;
}

void Course::Note(const char* what, size_t handle) {
    history_ += (history_.empty() ? "  done: " : ", ") + std::string(what) + " " + std::to_string(handle);
}

}  // namespace test_random
