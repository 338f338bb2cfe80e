// Stands before the shim's functions and those of libc: a program's own definitions come first.
#define _GNU_SOURCE
#include "simt/host_path/resting_driver.h"

#include <cuda.h>
#include <dlfcn.h>
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

// ---- The driver's calls that enqueue something --------------------------------------------------

static bool rests;
static uint64_t captures;
static DriverCalls asked;

void driver_rest(uint64_t capture) {
    memset(&asked, 0, sizeof(asked));
    captures = capture;
    rests = true;
}

DriverCalls driver_wake(void) {
    rests = false;
    return asked;
}

// Counts a call of a resting driver.
static bool is_asked_in_vain(uint64_t* calls) {
    *calls += rests;
    return rests;
}

// What would be called if this program did not define `name`.
#define NEXT(function, name) memcpy(&(function), &(void*){dlsym(RTLD_NEXT, name)}, sizeof(void*))

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction kernel, void** params, void** extra) {
    static CUresult (*next)(const CUlaunchConfig*, CUfunction, void**, void**);
    if (is_asked_in_vain(&asked.launches)) return CUDA_SUCCESS;
    if (next == NULL) NEXT(next, "cuLaunchKernelEx");
    return next(config, kernel, params, extra);
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    static CUresult (*next)(CUevent, CUstream);
    asked.recorded = event;
    if (is_asked_in_vain(&asked.records)) return CUDA_SUCCESS;
    if (next == NULL) NEXT(next, "cuEventRecord");
    return next(event, stream);
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    static CUresult (*next)(CUstream, CUevent, unsigned);
    asked.waited = event;
    if (is_asked_in_vain(&asked.waits)) return CUDA_SUCCESS;
    if (next == NULL) NEXT(next, "cuStreamWaitEvent");
    return next(stream, event, flags);
}

CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id,
                                   CUgraph* graph, const CUgraphNode** nodes, size_t* count) {
    static CUresult (*next)(CUstream, CUstreamCaptureStatus*, cuuint64_t*, CUgraph*, const CUgraphNode**, size_t*);
    if (rests) {
        *status = captures == 0 ? CU_STREAM_CAPTURE_STATUS_NONE : CU_STREAM_CAPTURE_STATUS_ACTIVE;
        *id = captures;
        return CUDA_SUCCESS;
    }
    if (next == NULL) NEXT(next, "cuStreamGetCaptureInfo_v2");
    return next(stream, status, id, graph, nodes, count);
}

// What a graph is to keep, as if it were gone at once.
CUresult cuUserObjectCreate(CUuserObject* object, void* data, CUhostFn release, unsigned references, unsigned flags) {
    static CUresult (*next)(CUuserObject*, void*, CUhostFn, unsigned, unsigned);
    if (rests) {
        *object = NULL;
        release(data);
        return CUDA_SUCCESS;
    }
    if (next == NULL) NEXT(next, "cuUserObjectCreate");
    return next(object, data, release, references, flags);
}

CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned references, unsigned flags) {
    static CUresult (*next)(CUgraph, CUuserObject, unsigned, unsigned);
    if (rests) return CUDA_SUCCESS;
    if (next == NULL) NEXT(next, "cuGraphRetainUserObject");
    return next(graph, object, references, flags);
}

// A captured stream cannot be asked: that ends the capture.
CUresult cuStreamGetId(CUstream stream, unsigned long long* id) {
    static CUresult (*next)(CUstream, unsigned long long*);
    if (rests && captures != 0) {
        ++asked.broken;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (next == NULL) NEXT(next, "cuStreamGetId");
    return next(stream, id);
}

// ---- Memory -------------------------------------------------------------------------------------

static _Thread_local uint64_t calls;

uint64_t memory_calls(void) { return calls; }

// The functions behind libc's own names.
extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
extern void* __libc_memalign(size_t, size_t);
extern void __libc_free(void*);

void* malloc(size_t bytes) {
    ++calls;
    return __libc_malloc(bytes);
}

void* calloc(size_t number, size_t bytes) {
    ++calls;
    return __libc_calloc(number, bytes);
}

void* realloc(void* memory, size_t bytes) {
    ++calls;
    return __libc_realloc(memory, bytes);
}

int posix_memalign(void** memory, size_t align, size_t bytes) {
    ++calls;
    *memory = __libc_memalign(align, bytes);
    return *memory == NULL ? ENOMEM : 0;
}

void free(void* memory) {
    ++calls;
    __libc_free(memory);
}
