// Tokens that are the same on all ranks: whether their sums are, too, bit for bit.
#pragma once

#include "reference/buffer.h"
#include "reference/routing.h"

__BEGIN_DECLS

// A routing of `num_tokens` tokens for each rank, the same ones everywhere: token t goes to expert t of each
// rank, modulo their number, with the same weights on all ranks.
RefRouting* ref_routing_everywhere(unsigned num_ranks, unsigned num_experts, unsigned num_tokens);

// What `rank` answers to a token: `hidden` bfloat16.
void ref_answer(unsigned rank, size_t token, unsigned hidden, void* row);

// Whether the buffer has the bytes that it has on rank 0. Collective.
void ref_check_same_everywhere(const RefBuffer* buffer);

__END_DECLS
