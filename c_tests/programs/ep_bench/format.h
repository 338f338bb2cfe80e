// The rows of a dispatch, as --dispatch, --cast and --forward choose them (docs/formats.md). Combines return
// bfloat16 rows whatever was dispatched.
#pragma once

#include <optional>
#include <string>

#include "reference/format.h"

namespace ep_bench {

struct DispatchRows {
    std::string name = "bf16";        // of a format
    bool forward = false;             // rows and scales are there from the beginning
    std::string cast;                 // of --cast: inside, outside; empty: it was not given
    std::optional<RefFormat> scaled;  // empty: bfloat16 without scales

    bool casts_outside() const { return cast == "outside"; }
    // The dispatch gets rows and their scales.
    bool sends_scales() const { return forward || casts_outside(); }
    const char* how() const;
    std::string where() const;  // inside, outside; empty: nothing is cast
};

// Fills in the sizes of rows of `hidden` elements. Returns a text if the format has no such rows, or is not cast
// as was asked.
std::string SizeRows(unsigned hidden, DispatchRows* rows);

// Row `number` (ref_row_of) as its rank has it at the beginning, and its scales if there are any yet.
void FillRow(const DispatchRows& rows, uint64_t number, void* row, void* scales);

// The same row as it must arrive, and its scales.
void ExpectRow(const DispatchRows& rows, uint64_t number, void* row, void* scales);

}  // namespace ep_bench
