// The cast with the CPU backend: the oracle's own, in the order of the stream.
#include "programs/ep_bench/cast/cast.h"
#include "reference/cast.h"

namespace ep_bench {
namespace {

RefFormat FormatOf(const CastWork& work) {
    const bool bytes = work.form == ScaleForm::kExponent;
    RefFormat format = ref_format_cast(ncclBfloat16, work.hidden, bytes ? ncclUint8 : ncclFloat32, work.block);
    format.round = work.form != ScaleForm::kFloat;
    return format;
}

void CastRows(void* data) {
    const CastWork& work = *static_cast<const CastWork*>(data);
    const RefFormat format = FormatOf(work);
    const auto* row = static_cast<const uint8_t*>(work.rows);
    auto* payload = static_cast<uint8_t*>(work.payload);
    auto* scales = static_cast<uint8_t*>(work.scales);
    for (unsigned token = 0; token < work.tokens; ++token) {
        ref_cast_row(&format, row, payload, scales);
        row += ref_format_in_bytes(&format);
        payload += ref_format_out_bytes(&format);
        scales += ref_format_scale_bytes(&format);
    }
}

}  // namespace

cudaError_t EnqueueCast(const CastWork* work, cudaStream_t stream) {
    return cudaLaunchHostFunc(stream, CastRows, const_cast<CastWork*>(work));
}

}  // namespace ep_bench
