// Rows and weights as functions of a seed; see rows.h for what the values are made to show.
#include "reference/rows.h"

#include "reference/buffer.h"

enum { kExponentBiasF32 = 127, kExponentBiasF16 = 15 };

size_t ref_row_bytes(const RefRows* rows) { return (size_t)rows->hidden * ep_datatype_size(rows->datatype); }

uint64_t ref_row_of(unsigned rank, size_t row) { return ((uint64_t)rank << 40) | row; }

// Of four elements one is special: 0 of either sign (one in 32), or a large power of two.
static bool is_special(uint32_t random) { return (random & 3u) == 0; }
static bool is_zero(uint32_t random) { return (random & 31u) == 0; }

// Both numbers are made before one is chosen: a branch that nobody can predict takes longer.
static uint16_t bf16_element(uint16_t random) {
    const unsigned exponent = kExponentBiasF32 - 12u + ((random >> 9) & 0xfu);
    const unsigned usual = exponent << 7 | ((random >> 2) & 0x7fu);
    const unsigned special = is_zero(random) ? 0 : (kExponentBiasF32 + 20u) << 7;
    return (uint16_t)((random & 0x8000u) | (is_special(random) ? special : usual));
}

static uint16_t f16_element(uint16_t random) {
    const unsigned exponent = kExponentBiasF16 - 6u + ((random >> 12) & 0x7u);
    const unsigned usual = exponent << 10 | ((random >> 2) & 0x3ffu);
    const unsigned special = is_zero(random) ? 0 : (kExponentBiasF16 + 13u) << 10;
    return (uint16_t)((random & 0x8000u) | (is_special(random) ? special : usual));
}

static uint32_t f32_element(uint32_t random) {
    const uint32_t exponent = kExponentBiasF32 - 16u + ((random >> 25) & 0x1fu);
    const uint32_t usual = exponent << 23 | ((random >> 2) & 0x7fffffu);
    const uint32_t special = is_zero(random) ? 0 : (kExponentBiasF32 + 30u) << 23;
    return (random & 0x80000000u) | (is_special(random) ? special : usual);
}

// In one row of four, one word.
static void plant_sentinel(uint64_t random, unsigned char* row, size_t bytes) {
    const uint32_t mark = kRefSentinel;
    if (random % 4 == 0) memcpy(row + random / 4 % (bytes / 4) * 4, &mark, sizeof(mark));
}

// The elements of 8 bytes of a row.
static uint64_t elements(ncclDataType_t datatype, uint64_t random) {
    if (datatype == ncclFloat32) {
        return f32_element((uint32_t)random) | (uint64_t)f32_element(random >> 32) << 32;
    }
    uint64_t bits = 0;
    for (unsigned at = 0; at < 64; at += 16) {
        const uint16_t part = (uint16_t)(random >> at);
        bits |= (uint64_t)(datatype == ncclFloat16 ? f16_element(part) : bf16_element(part)) << at;
    }
    return bits;
}

void ref_row_fill(const RefRows* rows, uint64_t index, void* out) {
    uint64_t state = ep_mix(rows->seed, index, 0);
    unsigned char* to = out;
    const size_t bytes = ref_row_bytes(rows);
    size_t done = 0;
    for (; done + 8 <= bytes; done += 8) {
        const uint64_t part = elements(rows->datatype, ep_random(&state));
        memcpy(to + done, &part, 8);
    }
    if (done < bytes) {
        const uint64_t part = elements(rows->datatype, ep_random(&state));
        memcpy(to + done, &part, bytes - done);
    }
    if (rows->any_bits) plant_sentinel(ep_random(&state), to, bytes);
}

void ref_rows_fill(const RefRows* rows, unsigned rank, size_t first, size_t count, void* out) {
    unsigned char* to = out;
    for (size_t i = 0; i < count; ++i) {
        ref_row_fill(rows, ref_row_of(rank, first + i), to + i * ref_row_bytes(rows));
    }
}

size_t ref_rows_wrong(const RefRows* rows, const uint64_t* numbers, size_t count, const void* actual) {
    const size_t bytes = ref_row_bytes(rows);
    const unsigned char* row = actual;
    EP_SCOPED unsigned char* expected = ref_host_new(bytes);
    size_t wrong = 0;
    for (size_t i = 0; i < count; ++i, row += bytes) {
        ref_row_fill(rows, numbers[i], expected);
        wrong += memcmp(row, expected, bytes) != 0;
    }
    return wrong;
}

float ref_weight(uint64_t seed, unsigned rank, size_t index) {
    uint64_t state = ep_mix(seed, rank, index);
    const uint64_t random = ep_random(&state);
    const float sign = (random & 1u) != 0 ? 1.0f : -1.0f;
    if ((random & 2u) != 0) return sign * ((random & 4u) != 0 ? 1.0f : 0.5f);
    return sign * (float)(1.0 / 1024 + ep_random_unit(&state));
}
