// The functions of libnccl_ep_probe.so (abi/probe): a second interface over the same core, for tests only.
#pragma once

#include <cuda_runtime.h>
#include <nccl.h>
#include <stddef.h>

typedef struct EpProbeGroup EpProbeGroup;
typedef struct EpProbeRoute EpProbeRoute;

typedef struct {
    size_t experts;  // over all ranks
    size_t tokens;   // most of any rank
    size_t hidden;   // elements of the largest row, bfloat16
    size_t high_throughput;  // not zero: high throughput
} EpProbeSettings;

typedef struct {
    void* home;     // [tokens, hidden] of this rank
    void* away;     // [local experts, ranks * most tokens, hidden]; HT without the first
    void* weights;  // float32 [tokens, top-k], low latency
    size_t hidden;
} EpProbeRows;

typedef struct {
    void* data;
    size_t bytes, tokens, top_k;  // tokens of the routing that is there, if any
} EpProbeMemory;

// 0, or the number of NCCL's result.
int epProbeOpen(EpProbeGroup** group, ncclComm_t comm, const EpProbeSettings* settings);
int epProbeClose(EpProbeGroup* group);
// A route is usable after its first update; each further update changes it.
int epProbeRoute(EpProbeRoute** route, const EpProbeGroup* group);
// A route in memory of the caller's, and how much it takes (0: refused).
size_t epProbeBytes(const EpProbeGroup* group, size_t top_k);
int epProbeRouteIn(EpProbeRoute** route, const EpProbeGroup* group, const EpProbeMemory* memory);
int epProbeUpdate(EpProbeRoute* route, const void* ids, size_t tokens, size_t top_k);
void epProbeForget(EpProbeRoute* route);
int epProbeAway(const EpProbeRoute* route, const EpProbeRows* rows, cudaStream_t stream);
int epProbeHome(const EpProbeRoute* route, const EpProbeRows* rows, cudaStream_t stream);
const char* epProbeText(void);
