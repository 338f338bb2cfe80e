// Deterministic test data and the conversions between float32 and the two 16-bit formats. All of it is plain arithmetic
// on bits, independent of the library and of CUDA's headers, so that it can judge both.
#include "base.h"

static uint64_t finalise(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

uint64_t ep_random(uint64_t* state) {
    *state += 0x9e3779b97f4a7c15u;
    return finalise(*state);
}

// The modulo's bias is below 2^-32 for the bounds that tests use.
uint64_t ep_random_below(uint64_t* state, uint64_t bound) { return ep_random(state) % bound; }

double ep_random_unit(uint64_t* state) { return (double)(ep_random(state) >> 11) * 0x1p-53; }

uint64_t ep_mix(uint64_t a, uint64_t b, uint64_t c) {
    uint64_t state = a;
    state = ep_random(&state) ^ b;
    state = ep_random(&state) ^ c;
    return ep_random(&state);
}

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

uint16_t ep_bf16_from_f32(float value) {
    const uint32_t bits = bits_of(value);
    // A NaN whose payload is only in the low half would round to an infinity: set the quiet bit.
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x0040u);
    const uint32_t to_even = 0x7fffu + ((bits >> 16) & 1u);
    return (uint16_t)((bits + to_even) >> 16);
}

float ep_f32_from_bf16(uint16_t bits) { return float_of((uint32_t)bits << 16); }

// Drops `shift` low bits of `value`, rounding to nearest, ties to even.
static uint32_t round_off(uint32_t value, unsigned shift) {
    const uint32_t half = 1u << (shift - 1);
    const uint32_t rest = value & ((1u << shift) - 1u);
    const uint32_t kept = value >> shift;
    return kept + (rest > half || (rest == half && (kept & 1u) != 0));
}

uint16_t ep_f16_from_f32(float value) {
    const uint32_t bits = bits_of(value);
    const uint16_t sign = (uint16_t)((bits >> 16) & 0x8000u);
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (magnitude >= 0x47800000u) return (uint16_t)(sign | 0x7c00u);  // 65536 and above
    if (magnitude >= 0x38800000u) {
        // Normal: rebias the exponent by 112. A carry out of the mantissa moves into the exponent,
        // and from the largest exponent into infinity, which is what rounding asks for.
        return (uint16_t)(sign | round_off(magnitude - (112u << 23), 13));
    }
    if (magnitude < 0x33000000u) return sign;  // below half of the smallest subnormal
    return (uint16_t)(sign | round_off((magnitude & 0x7fffffu) | 0x800000u, 126u - (magnitude >> 23)));
}

float ep_f32_from_f16(uint16_t bits) {
    const uint32_t sign = (uint32_t)(bits & 0x8000u) << 16;
    const uint32_t exponent = (bits >> 10) & 0x1fu;
    const uint32_t mantissa = bits & 0x3ffu;
    if (exponent == 31) return float_of(sign | 0x7f800000u | (mantissa << 13));
    if (exponent > 0) return float_of(sign | ((exponent + 112u) << 23) | (mantissa << 13));
    const float subnormal = (float)mantissa * 0x1p-24f;
    return sign != 0 ? -subnormal : subnormal;
}

void ep_store(ncclDataType_t datatype, void* base, size_t index, float value) {
    if (datatype == ncclFloat32) {
        ((float*)base)[index] = value;
        return;
    }
    EP_REQUIRE(datatype == ncclBfloat16 || datatype == ncclFloat16);
    ((uint16_t*)base)[index] = datatype == ncclBfloat16 ? ep_bf16_from_f32(value) : ep_f16_from_f32(value);
}

float ep_load(ncclDataType_t datatype, const void* base, size_t index) {
    if (datatype == ncclFloat32) return ((const float*)base)[index];
    EP_REQUIRE(datatype == ncclBfloat16 || datatype == ncclFloat16);
    const uint16_t bits = ((const uint16_t*)base)[index];
    return datatype == ncclBfloat16 ? ep_f32_from_bf16(bits) : ep_f32_from_f16(bits);
}

void ep_store_all(ncclDataType_t datatype, void* base, size_t count, const float* values) {
    uint16_t* bf16 = (uint16_t*)base;
    for (size_t i = 0; i < count; ++i) {
        if (datatype == ncclBfloat16) {
            bf16[i] = ep_bf16_from_f32(values[i]);
        } else {
            ep_store(datatype, base, i, values[i]);
        }
    }
}

void ep_load_all(ncclDataType_t datatype, const void* base, size_t count, float* values) {
    const uint16_t* bf16 = (const uint16_t*)base;
    for (size_t i = 0; i < count; ++i) {
        if (datatype == ncclBfloat16) {
            values[i] = ep_f32_from_bf16(bf16[i]);
        } else {
            values[i] = ep_load(datatype, base, i);
        }
    }
}

size_t ep_datatype_size(ncclDataType_t datatype) {
    switch (datatype) {
        case ncclFloat16:
        case ncclBfloat16: return 2;
        case ncclInt32:
        case ncclUint32:
        case ncclFloat32: return 4;
        case ncclInt64:
        case ncclUint64:
        case ncclFloat64: return 8;
        default: return 1;  // the 8-bit integers and floats
    }
}
