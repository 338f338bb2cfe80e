#include "reference/homes.h"

#include <mpi.h>

#include "reference/rows.h"
#include "reference/buffer.h"

RefRouting* ref_routing_everywhere(unsigned num_ranks, unsigned num_experts, unsigned num_tokens) {
    EP_SCOPED unsigned* all = ref_host_new(num_ranks * sizeof(*all));
    ref_tokens_full(all, num_ranks, num_tokens);
    RefRouting* routing = ref_routing_new(num_ranks, num_experts, num_ranks, all, kRefDistinct, 1);
    const unsigned local_experts = ref_local_experts(routing);
    for (unsigned rank = 0; rank < num_ranks; ++rank) {
        for (size_t i = 0; i < ref_entries_of(routing, rank); ++i) {
            const unsigned owner = (unsigned)(i % num_ranks);
            const unsigned local = (unsigned)(i / num_ranks % local_experts);
            routing->topk_idx[rank][i] = (int64_t)owner * local_experts + local;
            routing->weights[rank][i] = ref_weight(2, 0, i);
        }
    }
    return routing;
}

void ref_answer(unsigned rank, size_t token, unsigned hidden, void* row) {
    uint64_t state = ep_mix(3, rank, token);
    for (unsigned i = 0; i < hidden; ++i) {
        ep_store(ncclBfloat16, row, i, (float)(4 * ep_random_unit(&state) - 2));
    }
}

void ref_check_same_everywhere(const RefBuffer* buffer) {
    EP_SCOPED unsigned char* here = ref_host_new(buffer->bytes);
    EP_SCOPED unsigned char* there = ref_host_new(buffer->bytes);
    ep_download(here, ref_buffer_data(buffer), buffer->bytes);
    memcpy(there, here, buffer->bytes);
    MPI_Bcast(there, (int)buffer->bytes, MPI_BYTE, 0, MPI_COMM_WORLD);
    EP_CHECK_EQ_BYTES(here, there, buffer->bytes);
}
