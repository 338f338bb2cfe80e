// Work that is captured into a graph once and replayed. Where nothing can be captured, on the CPU
// backend, a replay calls it directly.
#ifndef C_TESTS_SUITES_GRAPH_CAPTURE_H_
#define C_TESTS_SUITES_GRAPH_CAPTURE_H_

#include "harness/harness.h"

// Begins a capture. Where nothing can be captured: counts a skip and returns false.
bool graph_begin_capture(cudaStream_t stream);
cudaGraph_t graph_end_capture(cudaStream_t stream);
// Takes over the graph. Must not be called by a capturing thread.
cudaGraphExec_t graph_instantiate(cudaGraph_t graph);

typedef struct {
    void (*play)(void* context);  // the work, on `stream` or on streams that fork from it
    void* context;
    cudaStream_t stream;
    cudaGraphExec_t executable;  // NULL where nothing can be captured
} Captured;

Captured graph_capture(cudaStream_t stream, void (*play)(void* context), void* context);
void graph_replay(const Captured* captured);
void graph_release(const Captured* captured);

#endif  // C_TESTS_SUITES_GRAPH_CAPTURE_H_
