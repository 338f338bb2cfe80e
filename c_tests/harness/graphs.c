// Capturing and replaying; see graphs.h.
#include "harness/graphs.h"

bool ep_begin_capture(cudaStream_t stream) { return ep_begin_capture_in(stream, cudaStreamCaptureModeThreadLocal); }

bool ep_begin_capture_in(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    const cudaError_t begun = cudaStreamBeginCapture(stream, mode);
    if (begun == cudaErrorNotSupported && ep_on_host_backend()) {
        (void)cudaGetLastError();
        ep_skip("the CPU backend cannot be captured; the same operations ran directly");
        return false;
    }
    EP_REQUIRE_CUDA(begun);
    return true;
}

cudaGraph_t ep_end_capture(cudaStream_t stream) {
    cudaGraph_t graph = NULL;
    EP_REQUIRE_CUDA(cudaStreamEndCapture(stream, &graph));
    return graph;
}

cudaGraphExec_t ep_instantiate(cudaGraph_t graph) {
    cudaGraphExec_t executable = NULL;
    EP_REQUIRE_CUDA(cudaGraphInstantiate(&executable, graph, 0));
    EP_REQUIRE_CUDA(cudaGraphDestroy(graph));
    return executable;
}

EpCaptured ep_capture(cudaStream_t stream, void (*play)(void* context), void* context) {
    EpCaptured captured = {play, context, stream, NULL};
    if (!ep_begin_capture(stream)) return captured;
    play(context);
    captured.executable = ep_instantiate(ep_end_capture(stream));
    return captured;
}

void ep_replay(const EpCaptured* captured) {
    if (captured->executable != NULL) {
        EP_CHECK_CUDA(cudaGraphLaunch(captured->executable, captured->stream));
    } else {
        captured->play(captured->context);
    }
}

void ep_release_captured(const EpCaptured* captured) {
    if (captured->executable != NULL) EP_REQUIRE_CUDA(cudaGraphExecDestroy(captured->executable));
}
