// What the references of operations share: sums of a token's rows, node by node.
#pragma once

#include <cstring>
#include <vector>

#include "harness/nodes.h"
#include "reference/buffer.h"
#include "reference/rows.h"

namespace ref {

// A row as float.
inline void LoadRow(const RefRows& rows, uint64_t number, float* values) {
    std::vector<unsigned char> row(ref_row_bytes(&rows));
    ref_row_fill(&rows, number, row.data());
    ep_load_all(rows.datatype, row.data(), rows.hidden, values);
}

// Rounds as a row in memory is.
inline void Round(const RefRows& rows, float* values) {
    std::vector<unsigned char> row(ref_row_bytes(&rows));
    ep_store_all(rows.datatype, row.data(), rows.hidden, values);
    ep_load_all(rows.datatype, row.data(), rows.hidden, values);
}

inline void Add(const std::vector<float>& values, float* sum) {
    for (size_t i = 0; i < values.size(); ++i) sum[i] += values[i];
}

inline void AddRow(const RefRows& rows, uint64_t number, float* sum) {
    std::vector<float> values(rows.hidden);
    LoadRow(rows, number, values.data());
    Add(values, sum);
}

// Writes the sum of a token of `rank` to its row of `out`. `add(distance, sum)` adds what the ranks of the node at that
// distance have and returns whether they have anything. What another node has summed crosses the network as one row;
// invariant sums round all.
template <typename AddNode>
void SumNodes(unsigned rank, size_t token, const RefRows& rows, void* out, AddNode add) {
    std::vector<float> total(rows.hidden);
    for (unsigned place = 0; place < ep_num_nodes(); ++place) {
        const unsigned distance = ep_distance_in_sum(rank, place);
        if (distance == 0 && !ep_sums_are_invariant()) {
            add(distance, total.data());  // the first one
            continue;
        }
        std::vector<float> of_node(rows.hidden);
        if (!add(distance, of_node.data())) continue;
        Round(rows, of_node.data());
        Add(of_node, total.data());
    }
    ep_store_all(rows.datatype, static_cast<unsigned char*>(out) + token * ref_row_bytes(&rows), rows.hidden,
                 total.data());
}

// Memory that a caller written in C frees.
template <typename T>
T* NewArray(size_t elements) {
    return static_cast<T*>(ref_host_new((elements + 1) * sizeof(T)));
}

}  // namespace ref
