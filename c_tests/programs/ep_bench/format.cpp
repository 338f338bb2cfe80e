// The formats by their names.
#include "programs/ep_bench/format.h"

#include <algorithm>
#include <array>

#include "reference/cast.h"

namespace ep_bench {
namespace {

constexpr auto kE4m3 = static_cast<ncclDataType_t>(10);
constexpr uint64_t kSeed = 1;

// Rows and scales of a format. What the library cannot cast to is always forwarded.
struct Format {
    const char* name;
    bool casts;
    ncclDataType_t payload;
    unsigned elements;  // of a row that share a byte of payload
    ncclDataType_t scales;
    unsigned block;
    bool round;
};

constexpr std::array<Format, 6> kFormats = {{
    {"fp8", true, kE4m3, 1, ncclFloat32, 128, false},
    {"fp8-pow2", true, kE4m3, 1, ncclFloat32, 128, true},
    {"ue8m0", true, kE4m3, 1, ncclUint8, 128, true},
    {"mxfp8", true, kE4m3, 1, ncclUint8, 32, true},
    {"mxfp4", false, ncclUint8, 2, ncclUint8, 32, false},
    {"nvfp4", false, ncclUint8, 2, kE4m3, 16, false},
}};

// Any bytes: a library that forwards them looks at none.
void FillBytes(void* to, size_t bytes, uint64_t* state) {
    std::generate_n(static_cast<uint8_t*>(to), bytes, [state] { return static_cast<uint8_t>(ep_random(state)); });
}

const Format* Find(const std::string& name) {
    const auto* found =
        std::find_if(kFormats.begin(), kFormats.end(), [&](const Format& format) { return name == format.name; });
    return found == kFormats.end() ? nullptr : found;
}

// Why the cast that --cast names does not happen; empty if it does, or if nobody asked.
std::string WhyNoCast(const Format* format, const DispatchRows& rows) {
    if (rows.cast.empty()) return "";
    if (rows.forward) return "--cast: with --forward nothing is cast";
    if (format == nullptr) return "--cast: bf16 is not cast, --dispatch names another format";
    return format->casts ? "" : "--cast: " + rows.name + " is always forwarded";
}

}  // namespace

std::string DispatchRows::where() const {
    if (!scaled || forward) return "";
    return casts_outside() ? "outside" : "inside";
}

const char* DispatchRows::how() const {
    if (forward) return "forwarded";
    return casts_outside() ? "cast by a kernel of this program, then forwarded" : "cast by the library";
}

std::string SizeRows(unsigned hidden, DispatchRows* rows) {
    const Format* format = Find(rows->name);
    const std::string refusal = WhyNoCast(format, *rows);
    if (!refusal.empty()) return refusal;
    if (format == nullptr) return rows->forward ? "--forward: bf16 has no scales" : "";
    rows->forward = rows->forward || !format->casts;
    if (hidden % (16 * format->elements) != 0) {
        return "--hidden: a row of " + rows->name + " is a multiple of 16 bytes, got " + std::to_string(hidden) +
               " elements";
    }
    if (rows->forward) {
        const unsigned scales = (hidden + format->block - 1) / format->block;
        rows->scaled = ref_format_forward(format->payload, hidden / format->elements, format->scales, scales);
    } else {
        rows->scaled = ref_format_cast(ncclBfloat16, hidden, format->scales, format->block);
        rows->scaled->round = format->round;
    }
    return "";
}

void FillRow(const DispatchRows& rows, uint64_t number, void* row, void* scales) {
    if (!rows.forward) {
        ref_cast_input(&*rows.scaled, kSeed, number, row);
        return;
    }
    uint64_t state = ep_mix(kSeed, number, 0);
    FillBytes(row, ref_format_in_bytes(&*rows.scaled), &state);
    FillBytes(scales, ref_format_scale_bytes(&*rows.scaled), &state);
}

void ExpectRow(const DispatchRows& rows, uint64_t number, void* row, void* scales) {
    if (rows.forward) {
        FillRow(rows, number, row, scales);
        return;
    }
    ref_format_place(&*rows.scaled, kSeed, number, ref_flat(1), 0, row, scales);
}

}  // namespace ep_bench
