// Device memory of the tests: poisoned, with guard zones on both sides, so that a stray write shows anywhere.
#pragma once

#include "harness/base.h"

__BEGIN_DECLS

enum { kRefPoison = 0xa5, kRefGuardBytes = 256 };

typedef struct {
    unsigned char* base;  // of the guard zone before the data; device memory
    size_t bytes;         // of the data
    size_t before;        // of the guard zone before it
    size_t behind;        // of the one behind it
    bool is_elsewhere;    // in memory of `ref_elsewhere`
} RefBuffer;

// Where buffers may lie instead of in allocations of their own; NULL: nowhere (mapped.h).
typedef struct {
    unsigned char* (*take)(size_t bytes);  // NULL if this one has to be an allocation
    void (*give_back)(void);               // one buffer less
} RefElsewhere;
extern const RefElsewhere* ref_elsewhere;

// All bytes of a new buffer are poison.
RefBuffer ref_buffer_new(size_t bytes);
// For what a call reads: without a guard zone behind it, so that on the CPU reading past the end faults, as writing
// does (256-byte multiples are followed by a page that nobody may touch).
RefBuffer ref_buffer_new_input(size_t bytes);
void ref_buffer_free(RefBuffer* buffer);
void* ref_buffer_data(const RefBuffer* buffer);
void ref_buffer_poison(const RefBuffer* buffer);
// The data; the rest is left alone.
void ref_buffer_upload(const RefBuffer* buffer, const void* host);
// One check: the data is `expected`, and the guard zones are still poison.
bool ref_buffer_check(EpSite site, const RefBuffer* buffer, const void* expected);
#define REF_CHECK_BUFFER(buffer, expected) \
    (EP_REACHED, ref_buffer_check(EP_HERE(#buffer " == " #expected), (buffer), (expected)))

// Host memory of the tests; ends all processes if there is none. Released with free().
void* ref_host_new(size_t bytes);     // all zero
void* ref_host_poison(size_t bytes);  // all poison

__END_DECLS
