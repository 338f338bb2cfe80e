// The cast to e4m3 by the steps between its numbers, and rows whose casts show mistakes; see cast.h.
#include "reference/cast.h"

#include <math.h>
#include "reference/buffer.h"

enum { kMostCode = 0x7e, kNanCode = 0x7f, kMaxBlock = 128, kKinds = 9 };

// The numbers of e4m3 from 0 up to 448.
static double number_of(unsigned code) {
    const unsigned field = code >> 3;
    const double mantissa = (code & 7u) / 8.0;
    return field == 0 ? mantissa / 64 : (1.0 + mantissa) * (1u << field) / 128;  // exact
}

uint8_t ref_e4m3(float value) {
    if (isnan(value)) return kNanCode;
    const uint8_t sign = signbit(value) ? 0x80u : 0;
    const double wanted = fabs((double)value);
    if (wanted >= number_of(kMostCode)) return sign | kMostCode;
    // Eight steps from each power of two to the next, and as many below 2^-6.
    const int exponent = wanted < 0x1p-6 ? -6 : ilogb(wanted);
    const long steps = lrint(ldexp(wanted, 3 - exponent));  // ties to even
    return (uint8_t)(sign | (unsigned)(8 * (exponent + 6) + steps));
}

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

// `scale` is stored, elements are multiplied with `factor`.
static void scale_of(const float* elements, unsigned count, bool power, float* scale, float* factor) {
    float most = 1e-4f;
    // Not fmaxf: a signalling NaN would win.
    for (unsigned i = 0; i < count; ++i) {
        if (fabsf(elements[i]) > most) most = fabsf(elements[i]);
    }
    *scale = most * (1.0f / 448.0f);
    *factor = 448.0f / most;
    if (!power || isinf(*scale)) return;
    int exponent = 0;
    const float fraction = frexpf(*scale, &exponent);  // fraction * 2^exponent, from 1/2 to 1
    if (fraction == 0.5f) --exponent;
    *scale = ldexpf(1.0f, exponent);
    *factor = ldexpf(1.0f, -exponent);
}

void ref_cast_row(const RefFormat* format, const void* row, uint8_t* payload, void* scales) {
    EP_SCOPED float* elements = ref_host_new(format->hidden * sizeof(*elements));
    ep_load_all(format->from, row, format->hidden, elements);
    memset(scales, 0, ref_format_scale_bytes(format));
    const bool bytes = format->scale_type != ncclFloat32;
    for (unsigned begin = 0, block = 0; begin < format->hidden; begin += format->block, ++block) {
        const unsigned rest = format->hidden - begin;
        const unsigned count = rest < format->block ? rest : format->block;
        float scale = 0;
        float factor = 0;
        scale_of(&elements[begin], count, bytes || format->round, &scale, &factor);
        for (unsigned i = begin; i < begin + count; ++i) payload[i] = ref_e4m3(elements[i] * factor);
        if (bytes) {
            ((uint8_t*)scales)[block] = (uint8_t)(bits_of(scale) >> 23);
        } else {
            memcpy((char*)scales + block * sizeof(scale), &scale, sizeof(scale));
        }
    }
}

// ---- Rows --------------------------------------------------------------------------------------

static float plain(uint64_t random, int exponent) {
    const float mantissa = 1.0f + (float)(random & 0xffffu) / 65536.0f;
    const int scale = exponent - (int)(random >> 16 & 7u);
    return ldexpf((random >> 20 & 1u) != 0 ? -mantissa : mantissa, scale);
}

// Half way between two numbers of e4m3, times 2^exponent.
static float tie(uint64_t random, int exponent) {
    const unsigned code = (unsigned)(random % kMostCode);
    const double middle = (number_of(code) + number_of(code + 1)) / 2;
    const float value = (float)ldexp(middle, exponent);
    return (random >> 20 & 1u) != 0 ? -value : value;
}

// An element of a block of kind `kind`; the block's `exponent` fits float16, too.
static float element(unsigned kind, uint64_t random, unsigned index, int exponent) {
    const float largest = ldexpf(448.0f, exponent);
    switch (kind) {
        case 0:  // zeros of both signs
            return (random & 1u) != 0 ? -0.0f : 0.0f;
        case 1:  // the block's scale is an exact power of two, and elements are ties
            return index == 0 ? largest : tie(random, exponent);
        case 2:  // the next larger one
            return index == 0 ? largest * (1.0f + 1.0f / 128) : plain(random, exponent);
        case 3: return index % 29 == 3 ? NAN : plain(random, exponent);
        case 4: return index == 17 ? ((random & 1u) != 0 ? -INFINITY : INFINITY) : plain(random, exponent);
        case 5:  // below the least maximum
            return plain(random, -20);
        default: return plain(random, exponent);
    }
}

static void every_number(const RefFormat* format, uint64_t seed, uint64_t number, void* row) {
    const uint64_t token = number & 0xffffffffffu;
    for (unsigned i = 0; i < format->hidden; ++i) {
        const uint64_t index = token * format->hidden + i;
        // In order, so that neighbours are alike; or mixed; or all below a power of two.
        const uint16_t bits = (uint16_t)(seed % 4 == 1 ? index * 40503u : index);
        uint16_t kept = bits;
        if (seed % 4 >= 2 && i % 32 == seed / 4 % 32) {
            kept = ep_bf16_from_f32(ldexpf(1.0f, (int)(seed / 128 % 60) - 20));
        }
        ep_store(format->from, row, i, ep_f32_from_bf16(kept));
    }
}

void ref_cast_input(const RefFormat* format, uint64_t seed, uint64_t number, void* row) {
    if (format->every_bf16) {
        every_number(format, seed, number, row);
        return;
    }
    uint64_t state = ep_mix(seed, number, 7);
    for (unsigned begin = 0; begin < format->hidden; begin += kMaxBlock) {
        const unsigned kind = (unsigned)ep_random_below(&state, kKinds);
        const int exponent = (int)ep_random_below(&state, 14) - 8;
        for (unsigned i = 0; i < kMaxBlock && begin + i < format->hidden; ++i) {
            const uint64_t random = ep_random(&state);
            ep_store(format->from, row, begin + i, element(kind, random, i, exponent));
            if (kind != kKinds - 1) continue;
            // Any bits at all.
            const size_t width = ep_datatype_size(format->from);
            if (ep_random_below(&state, 8) == 0) memcpy((char*)row + (begin + i) * width, &random, width);
        }
    }
}
