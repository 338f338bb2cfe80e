// Guarded device memory; see buffer.h.
#include "reference/buffer.h"

const RefElsewhere* ref_elsewhere = NULL;

void* ref_host_new(size_t bytes) {
    void* memory = calloc(bytes > 0 ? bytes : 1, 1);
    EP_REQUIRE(memory != NULL);
    return memory;
}

void* ref_host_poison(size_t bytes) {
    void* memory = ref_host_new(bytes);
    memset(memory, kRefPoison, bytes);
    return memory;
}

static size_t all_bytes_of(const RefBuffer* buffer) { return buffer->before + buffer->bytes + buffer->behind; }

static RefBuffer buffer_between(size_t before, size_t bytes, size_t behind) {
    RefBuffer buffer = {NULL, bytes, before, behind, false};
    if (ref_elsewhere != NULL) buffer.base = ref_elsewhere->take(all_bytes_of(&buffer));
    buffer.is_elsewhere = buffer.base != NULL;
    if (!buffer.is_elsewhere) buffer.base = ep_device_alloc(all_bytes_of(&buffer));
    ref_buffer_poison(&buffer);
    return buffer;
}

RefBuffer ref_buffer_new(size_t bytes) { return buffer_between(kRefGuardBytes, bytes, kRefGuardBytes); }

RefBuffer ref_buffer_new_input(size_t bytes) {
    return buffer_between(2 * kRefGuardBytes - bytes % kRefGuardBytes, bytes, 0);
}

void ref_buffer_free(RefBuffer* buffer) {
    if (buffer->is_elsewhere) {
        if (ref_elsewhere != NULL) ref_elsewhere->give_back();
    } else if (buffer->base != NULL) {
        ep_device_free(buffer->base);
    }
    buffer->is_elsewhere = false;
    buffer->base = NULL;
    buffer->bytes = 0;
}

void* ref_buffer_data(const RefBuffer* buffer) { return buffer->base + buffer->before; }

void ref_buffer_poison(const RefBuffer* buffer) {
    EP_REQUIRE_CUDA(cudaMemset(buffer->base, kRefPoison, all_bytes_of(buffer)));
}

void ref_buffer_upload(const RefBuffer* buffer, const void* host) {
    ep_upload(ref_buffer_data(buffer), host, buffer->bytes);
}

bool ref_buffer_check(EpSite site, const RefBuffer* buffer, const void* expected) {
    const size_t all_bytes = all_bytes_of(buffer);
    EP_SCOPED unsigned char* got = ref_host_new(all_bytes);
    EP_SCOPED unsigned char* wanted = ref_host_poison(all_bytes);
    ep_download(got, buffer->base, all_bytes);
    if (buffer->bytes > 0) memcpy(wanted + buffer->before, expected, buffer->bytes);
    return ep_check_eq_bytes(site, got, wanted, all_bytes);
}
