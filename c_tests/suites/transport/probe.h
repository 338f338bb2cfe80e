// The functions of libnccl_ep_probe.so (abi/probe) that open a transport between nodes alone.
#pragma once

#include <cuda_runtime.h>
#include <nccl.h>
#include <stddef.h>

typedef struct EpProbeRail EpProbeRail;

typedef struct {
    size_t peer;
    void* data;
    size_t bytes;
} EpProbeMessage;

// 0, or the number of NCCL's result. Ranks with the same `node` are on one.
int epProbeRailOpen(EpProbeRail** rail, ncclComm_t comm, const char* node, unsigned timeout_ms, cudaStream_t stream);
void epProbeRailClose(EpProbeRail* rail);
// Writes at most `most` ranks; gives how many there are.
size_t epProbeRailPeers(const EpProbeRail* rail, size_t* ranks, size_t most);
size_t epProbeRailForwarded(const EpProbeRail* rail, size_t* ranks, size_t most);
int epProbeRailExchange(const EpProbeRail* rail, const EpProbeMessage* sends, size_t num_sends,
                        const EpProbeMessage* receives, size_t num_receives, cudaStream_t stream);
int epProbeRailHealth(const EpProbeRail* rail);
int epProbeRailFaults(const EpProbeRail* rail);  // how often it told of a failure
void epProbeRailAbort(const EpProbeRail* rail);
const char* epProbeText(void);
