// Work that is captured into a graph once and replayed. Where nothing can be captured, on the CPU
// backend, a replay calls it directly.
#pragma once

#include "harness/base.h"

__BEGIN_DECLS

// Begins a capture that other threads cannot disturb. Where nothing can be captured: counts a skip and returns false.
bool ep_begin_capture(cudaStream_t stream);
bool ep_begin_capture_in(cudaStream_t stream, enum cudaStreamCaptureMode mode);
cudaGraph_t ep_end_capture(cudaStream_t stream);
// Takes over the graph. Must not be called by a capturing thread.
cudaGraphExec_t ep_instantiate(cudaGraph_t graph);

typedef struct {
    void (*play)(void* context);  // the work, on `stream` or on streams that fork from it
    void* context;
    cudaStream_t stream;
    cudaGraphExec_t executable;  // NULL where nothing can be captured
} EpCaptured;

EpCaptured ep_capture(cudaStream_t stream, void (*play)(void* context), void* context);
void ep_replay(const EpCaptured* captured);
void ep_release_captured(const EpCaptured* captured);

__END_DECLS
