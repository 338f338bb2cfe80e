// The rows of a dispatch, as --dispatch and --forward choose them (docs/formats.md). Combines return bfloat16 rows
// whatever was dispatched.
#ifndef C_TESTS_PROGRAMS_EP_BENCH_FORMAT_H_
#define C_TESTS_PROGRAMS_EP_BENCH_FORMAT_H_

#include <optional>
#include <string>

#include "reference/format.h"

namespace ep_bench {

struct DispatchRows {
    std::string name = "bf16";         // of a format
    bool forward = false;              // rows and scales are there before the dispatch
    std::optional<RefFormat> scaled;   // empty: bfloat16 without scales

    const char* how() const { return forward ? "forwarded" : "cast by the library"; }
};

// Checks the names; `rows` has no sizes yet. Returns a text if they are invalid.
std::string ReadFormat(const std::string& name, DispatchRows* rows);

// Fills in the sizes of rows of `hidden` elements. Returns a text if the format has no such rows.
std::string SizeRows(unsigned hidden, DispatchRows* rows);

// Row `number` (ref_row_of) as its rank has it, and its scales if they are forwarded.
void FillRow(const DispatchRows& rows, uint64_t number, void* row, void* scales);

// The same row as it must arrive, and its scales.
void ExpectRow(const DispatchRows& rows, uint64_t number, void* row, void* scales);

}  // namespace ep_bench

#endif  // C_TESTS_PROGRAMS_EP_BENCH_FORMAT_H_
