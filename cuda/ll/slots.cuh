// Where an entry lands: the slot of the bank through which its row travels, and the row of the output that
// it takes. Another layout of the output is another type beside ExpertMajor.
#pragma once

#include "../base/expert.cuh"
#include "../peer/peer.cuh"

namespace nccl_ep {

// Instead of an output row: the entry found no free one, and the group fails.
constexpr int32_t kDropped = -2;

// An entry packet's data: the local expert in the high bits, below them the entry's index among the rows
// that its source sends to this expert.
struct EntryWord {
    static constexpr uint32_t kIndexBits = LL_INDEX_BITS;
    static constexpr uint32_t kMaxIndex = (1u << kIndexBits) - 1;
    // The entry's expert is on another rank, or there is none.
    static constexpr uint32_t kElsewhere = 0xffffffffu;

    uint32_t data;

    __device__ static EntryWord here(uint32_t expert, uint32_t index) {
        return {expert << kIndexBits | (index < kMaxIndex ? index : kMaxIndex)};
    }
    __device__ static EntryWord elsewhere() { return {kElsewhere}; }
    __device__ bool is_here() const { return data != kElsewhere; }
    __device__ uint32_t expert() const { return data >> kIndexBits; }
    __device__ uint32_t index() const { return data & kMaxIndex; }
};

// The slots of a bank. In dispatch a token's row has one slot at each rank that it goes to; in combine each
// expert rank's sum has one at the token's home or its carrier, or, in exact mode, each entry's row.
struct BankSlots {
    const LlShape& shape;
    // Ranks of a node.
    uint32_t peers;

    __device__ uint32_t of_token(uint32_t source, uint32_t token) const {
        return source * shape.max_tokens + token;
    }
    // At the carrier of the token's rank, whose source that is, from `peer`.
    __device__ uint32_t of_sum(uint32_t number, uint32_t token, uint32_t peer) const {
        return (number * shape.max_tokens + token) * peers + peer;
    }
    __device__ uint32_t of_entry(uint32_t token, uint32_t k) const {
        return token * shape.top_k + k;
    }
};

// The output `[local_experts][ranks * max_tokens]`: the rows of an expert together, by source rank
// ascending, then token, then k.
struct ExpertMajor {
    const LlShape& shape;
    uint32_t ranks;

    __device__ uint32_t rows_of_expert() const { return ranks * shape.max_tokens; }
    __device__ uint32_t rows() const { return shape.local_experts * ranks * shape.max_tokens; }

    // Where the table of counts and begins holds (source, expert).
    __device__ uint32_t cell(uint32_t source, uint32_t expert) const {
        return source * shape.local_experts + expert;
    }
    // In `table`, turns what each source sends to `expert` into where its rows begin; returns their sum.
    __device__ uint32_t find_begins(uint32_t* table, uint32_t expert) const {
        uint32_t total = 0;
        for (uint32_t source = 0; source < ranks; ++source) {
            const uint32_t count = table[cell(source, expert)];
            table[cell(source, expert)] = total;
            total += count;
        }
        return total;
    }
    // How many of `total` rows that came for an expert there is room for.
    __device__ uint32_t kept(uint32_t total) const {
        const uint32_t most = rows_of_expert();
        return total < most ? total : most;
    }
    // After find_begins, which has given `total`, more than there is room for: the first source that sends an
    // expert more rows than its share. There is one, and its ids repeat the expert, as it has no more tokens.
    struct Surplus {
        uint32_t source;
        uint32_t rows;
    };
    __device__ Surplus find_surplus(const uint32_t* table, uint32_t expert, uint32_t total) const {
        Surplus found = {0, 0};
#pragma unroll 1  // seldom done
        for (uint32_t source = ranks; source-- > 0;) {
            const uint32_t begin = table[cell(source, expert)];
            if (total - begin > shape.max_tokens) {
                found = {source, total - begin};
            }
            total = begin;
        }
        return found;
    }
    // The output row of an entry from `source`: kNowhere, kDropped or a row.
    __device__ int32_t row(const uint32_t* begins, uint32_t source, EntryWord entry) const {
        if (!entry.is_here()) {
            return kNowhere;
        }
        const uint32_t most = rows_of_expert();
        const uint32_t slot = begins[cell(source, entry.expert())] + entry.index();
        return slot < most ? static_cast<int32_t>(entry.expert() * most + slot) : kDropped;
    }
};

// The layout of the output that LL kernels read and write.
using OutputSlots = ExpertMajor;

}  // namespace nccl_ep
