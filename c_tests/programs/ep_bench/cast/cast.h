// The cast of --cast outside: this program rounds bfloat16 rows to e4m3 itself, as an inference engine does
// whose library casts nothing, and then forwards rows and scales (docs/formats.md has the formula).
// A program is linked with one of on_gpu.cu and on_cpu.cpp, which run kernel.cuh, and on_host.cpp.
#pragma once

#include <cuda_runtime_api.h>

namespace ep_bench {

enum class ScaleForm {
    kFloat,     // float32
    kPower,     // float32, powers of two
    kExponent,  // exponent bytes (UE8M0) of powers of two
};

// Rows, payload and scales are dense in memory of the device.
struct CastWork {
    const void* rows;  // [tokens, hidden], bfloat16
    void* payload;     // [tokens, hidden], e4m3
    void* scales;      // [tokens, blocks of a row]
    unsigned tokens;
    unsigned hidden;  // a multiple of 16
    unsigned block;   // elements that share a scale: 128, or 32 with exponents
    ScaleForm form;
};

// Enqueues the cast and does not wait for it. Until it has run, `work` must not go.
cudaError_t EnqueueCast(const CastWork* work, cudaStream_t stream);

}  // namespace ep_bench
