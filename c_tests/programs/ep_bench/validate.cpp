// Validation by c_tests/reference. Outputs are overwritten beforehand, so a row that the library
// omits cannot look right; so are the rows of experts to which no token may go.
#include "programs/ep_bench/validate.h"

#include <mpi.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "harness/nodes.h"
#include "reference/ht.h"
#include "reference/ll.h"
#include "reference/owned.hpp"
#include "reference/rank_major.h"

namespace ep_bench {
namespace {

constexpr int kStale = 0xff;  // a NaN in bfloat16 and float32, -1 in the integers

// Received tensors can be as large as the memory of a GPU, so only the rows in use are compared:
// those of one expert after the other, in high throughput all of them.
struct Part {
    size_t first_row;
    std::vector<uint64_t> tokens;  // the numbers of their rows
};

RefLayout LayoutLl(const Session& session) {
    return ref_expert_major(session.received.sizes[0], session.received.sizes[1]);
}

RefLayout LayoutByRank(const Session& session) {
    return ref_rank_major(session.received.sizes[0], session.received.sizes[1]);
}

std::vector<Part> PartsLl(const Routing& routing, RefLayout layout) {
    std::vector<int32_t> counts(layout.parts);
    const ref::RowNumbers numbers(ref_ll_slots(&routing.all(), routing.rank(), layout, counts.data()));
    const uint64_t* next = numbers.get();
    std::vector<Part> parts;
    for (unsigned expert = 0; expert < layout.parts; ++expert) {
        const uint64_t* const begin = next;
        next += counts[expert];
        parts.push_back({ref_layout_row(layout, expert, 0), {begin, next}});
    }
    return parts;
}

// One for each source.
std::vector<Part> PartsByRank(const Routing& routing, const Session& session) {
    const RefLayout layout = LayoutByRank(session);
    std::vector<Part> parts(layout.parts);
    for (unsigned source = 0; source < layout.parts; ++source) {
        parts[source].first_row = ref_layout_row(layout, source, 0);
    }
    const auto note = [](unsigned source, size_t token, size_t, void* context) {
        (*static_cast<std::vector<Part>*>(context))[source].tokens.push_back(ref_row_of(source, token));
    };
    ref_rank_each(&routing.all(), routing.rank(), layout, note, &parts);
    return parts;
}

std::vector<Part> PartsHt(const Routing& routing) {
    const unsigned received = ref_ht_received(&routing.all(), routing.rank());
    const ref::RowNumbers numbers(ref_ht_rows(&routing.all(), routing.rank()));
    return {{0, {numbers.get(), numbers.get() + received}}};
}

// Rows of a tensor whose last dimension is the row.
template <typename T>
std::vector<T> Download(const ncclNDTensor_t& tensor, size_t first, size_t rows) {
    const size_t columns = tensor.sizes[tensor.ndim - 1];
    std::vector<T> host(rows * columns);
    ep_download(host.data(), static_cast<const T*>(tensor.data) + first * columns, host.size() * sizeof(T));
    return host;
}

// Rows of any format.
std::vector<uint8_t> DownloadBytes(const ncclNDTensor_t& tensor, size_t first, size_t rows, size_t row_bytes) {
    std::vector<uint8_t> host(rows * row_bytes);
    ep_download(host.data(), static_cast<const uint8_t*>(tensor.data) + first * row_bytes, host.size());
    return host;
}

// What came, and what should have; with the bytes of a row.
struct Compared {
    const void *got, *expected;
    size_t row_bytes;
};

// Rows of which one of the parts differs.
uint64_t WrongRows(const std::vector<Compared>& parts, size_t rows) {
    uint64_t wrong = 0;
    for (size_t row = 0; row < rows; ++row) {
        wrong += std::any_of(parts.begin(), parts.end(), [row](const Compared& part) {
            const size_t at = row * part.row_bytes;
            return std::memcmp(static_cast<const char*>(part.got) + at, static_cast<const char*>(part.expected) + at,
                               part.row_bytes) != 0;
        });
    }
    return wrong;
}

class Validation {
   public:
    Validation(const Options& options, const Routing& routing, const Session& session, bool replays)
        : options_(options),
          routing_(routing),
          session_(session),
          replays_(replays),
          tokens_(TokenRows(options)),
          results_{tokens_.datatype, tokens_.hidden, tokens_.seed + 1, false},
          parts_(options.by_rank         ? PartsByRank(routing, session)
                 : options.low_latency() ? PartsLl(routing, LayoutLl(session))
                                         : PartsHt(routing)) {}

    void Prepare() const;
    uint64_t WrongDispatch() const;
    uint64_t WrongCombine() const;
    RefLlSum Sums() const;
    uint64_t WrongCast() const;

   private:
    uint64_t WrongCounts() const;
    uint64_t WrongRouting() const;
    uint64_t WrongScaled(const ncclNDTensor_t& tokens, const ncclNDTensor_t& scales, const Part& part) const;

    const Options& options_;
    const Routing& routing_;
    const Session& session_;
    const bool replays_;
    RefRows tokens_;
    RefRows results_;
    std::vector<Part> parts_;
};

void Validation::Prepare() const {
    std::vector<const ncclNDTensor_t*> written = {
        &session_.received, &session_.received_scales, &session_.received_weights, &session_.received_idx,
        &session_.counter,  &session_.expert_outputs,  &session_.combined};
    if (options_.rows.casts_outside()) written.insert(written.end(), {&session_.tokens, &session_.scales});
    for (const ncclNDTensor_t* tensor : written) {
        // In a view nothing is written but by the library.
        const bool is_view = options_.view && tensor == &session_.received;
        if (tensor->data != nullptr && !is_view) ep_tensor_fill(tensor, kStale);
    }
    for (const Part& part : parts_) {
        std::vector<uint16_t> rows(part.tokens.size() * results_.hidden);
        ref_rows_fill(&results_, routing_.rank(), part.first_row, part.tokens.size(), rows.data());
        ep_upload(static_cast<uint16_t*>(session_.expert_outputs.data) + part.first_row * results_.hidden, rows.data(),
                  rows.size() * sizeof(uint16_t));
    }
    EP_REQUIRE_CUDA(cudaDeviceSynchronize());
}

// Sum of the errors in the numbers of used slots.
uint64_t Validation::WrongCounts() const {
    std::vector<int32_t> counts(parts_.size());
    ep_tensor_download(&session_.counter, counts.data());
    uint64_t wrong = 0;
    for (size_t expert = 0; expert < parts_.size(); ++expert) {
        const auto expected = static_cast<int64_t>(parts_[expert].tokens.size());
        wrong += static_cast<uint64_t>(std::abs(counts[expert] - expected));
    }
    return wrong;
}

// Rows with wrong ids or weights; unused ones, too, but rank-major their weights may be any.
uint64_t Validation::WrongRouting() const {
    const RefRouting& all = routing_.all();
    const size_t rows = options_.by_rank ? ref_layout_rows(LayoutByRank(session_)) : session_.received.sizes[0];
    const size_t top_k = routing_.shape().top_k;
    const auto got_ids = Download<int64_t>(session_.received_idx, 0, rows);
    const auto got_weights = Download<float>(session_.received_weights, 0, rows);
    std::vector<int64_t> ids(rows * top_k);
    std::vector<float> weights(got_weights);
    if (options_.by_rank) {
        ref_rank_beside(&all, routing_.rank(), LayoutByRank(session_), ids.data(), weights.data());
    } else {
        ref_ht_dispatch_routing(&all, &all, routing_.rank(), static_cast<unsigned>(rows), ids.data(), weights.data());
    }
    return WrongRows({{got_ids.data(), ids.data(), top_k * sizeof(int64_t)},
                      {got_weights.data(), weights.data(), top_k * sizeof(float)}}, rows);
}

// Rows that differ in payload or scales.
uint64_t Validation::WrongScaled(const ncclNDTensor_t& tokens, const ncclNDTensor_t& scales, const Part& part) const {
    const RefFormat& format = *options_.rows.scaled;
    const size_t row_bytes = ref_format_out_bytes(&format);
    const size_t scale_bytes = ref_format_scale_bytes(&format);
    const auto got = DownloadBytes(tokens, part.first_row, part.tokens.size(), row_bytes);
    const auto got_scales = DownloadBytes(scales, part.first_row, part.tokens.size(), scale_bytes);
    std::vector<uint8_t> rows(got.size());
    std::vector<uint8_t> row_scales(got_scales.size());
    for (size_t i = 0; i < part.tokens.size(); ++i) {
        ExpectRow(options_.rows, part.tokens[i], &rows[i * row_bytes], &row_scales[i * scale_bytes]);
    }
    return WrongRows({{got.data(), rows.data(), row_bytes}, {got_scales.data(), row_scales.data(), scale_bytes}},
                     part.tokens.size());
}

// All rows of this rank, also those that go nowhere.
uint64_t Validation::WrongCast() const {
    if (!options_.rows.casts_outside()) return 0;
    Part own = {0, {}};
    for (size_t token = 0; token < routing_.tokens(); ++token) {
        own.tokens.push_back(ref_row_of(routing_.rank(), token));
    }
    return WrongScaled(session_.tokens, session_.scales, own);
}

// Replays have their view elsewhere, so its rows are compared only after a call.
uint64_t Validation::WrongDispatch() const {
    uint64_t wrong = options_.low_latency() ? WrongCounts() : 0;
    if (options_.by_rank || !options_.low_latency()) wrong += WrongRouting();
    if (options_.view && replays_) return wrong;
    for (const Part& part : parts_) {
        const size_t rows = part.tokens.size();
        if (options_.rows.scaled) {
            wrong += WrongScaled(session_.received, session_.received_scales, part);
            continue;
        }
        const auto got = Download<uint16_t>(session_.received, part.first_row, rows);
        wrong += ref_rows_wrong(&tokens_, part.tokens.data(), rows, got.data());
    }
    return wrong;
}

// How combines sum; exact sums, if they are chosen and possible.
RefLlSum Validation::Sums() const {
    const bool possible = ep_num_nodes() == 1 && routing_.shape().top_k <= routing_.all().num_ranks;
    if (options_.variant == NCCL_EP_VARIANT_LL_REDUCE) return kRefReduce;
    return options_.variant == NCCL_EP_VARIANT_LL_EXACT && possible ? kRefExact : ref_ll_sum();
}

uint64_t Validation::WrongCombine() const {
    const RefRouting& all = routing_.all();
    const unsigned rank = routing_.rank();
    const size_t hidden = results_.hidden;
    std::vector<uint16_t> expected(routing_.tokens() * hidden);
    if (options_.by_rank) {
        ref_rank_combine(&all, rank, LayoutByRank(session_), &results_, expected.data());
    } else if (options_.low_latency()) {
        ref_ll_combine_as(Sums(), &all, &all, rank, LayoutLl(session_), &results_, expected.data());
    } else {
        ref_ht_combine(&all, rank, &results_, expected.data());
    }
    const auto got = Download<uint16_t>(session_.combined, 0, routing_.tokens());
    return WrongRows({{got.data(), expected.data(), hidden * sizeof(uint16_t)}}, routing_.tokens());
}

}  // namespace

Wrong Validate(const EpEnv& env, const Options& options, const Routing& routing, Session* session,
               const Operations& operations) {
    const Validation validation(options, routing, *session, operations.replay);
    validation.Prepare();
    operations.dispatch();
    EP_REQUIRE_CUDA(cudaStreamSynchronize(env.stream));
    uint64_t mine[3] = {validation.WrongDispatch()};  // a view ends with the combine
    operations.combine();
    EP_REQUIRE_CUDA(cudaStreamSynchronize(env.stream));
    mine[1] = validation.WrongCombine();
    mine[2] = validation.WrongCast();
    uint64_t all[3] = {0, 0, 0};
    MPI_Allreduce(mine, all, 3, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    return {all[0], all[1], all[2]};
}

}  // namespace ep_bench
