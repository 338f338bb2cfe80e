// Formats of the rows of a dispatch: opaque, with scales that are forwarded, or cast to e4m3; how scales lie in memory;
// and, for each row, what is read and what must arrive. Any rank computes the rows of any other from a seed.
#pragma once

#include "reference/layout.h"
#include "reference/lists.h"
#include "reference/rows.h"

__BEGIN_DECLS

typedef enum { kRefOpaque, kRefForward, kRefCast } RefMeaning;

// Orders of scales. A pitch is larger than it must be by `spare` elements, and so is the distance of experts.
typedef enum { kRefDense, kRefRowPitch, kRefColumns, kRefNumOrders } RefOrder;

typedef struct {
    RefMeaning meaning;
    ncclDataType_t from;  // of the rows that are read
    ncclDataType_t to;    // as the rows that arrive are declared
    unsigned hidden;
    ncclDataType_t scale_type;
    unsigned num_scales;  // of a row; 0 without scales
    unsigned block;       // cast: elements that share a scale
    bool round;           // cast: config.round_scales
    bool every_bf16;      // cast: rows of 65,536 elements together have all numbers of bfloat16
    RefOrder in_order, out_order;
    unsigned spare;
} RefFormat;

RefFormat ref_format_opaque(ncclDataType_t datatype, unsigned hidden);
// Scales are dense; the orders may be set afterwards.
RefFormat ref_format_forward(ncclDataType_t datatype, unsigned hidden, ncclDataType_t scale_type, unsigned num_scales);
// A cast with scales of blocks of 128 or 32 elements. float32 scales are for blocks of 128 only.
RefFormat ref_format_cast(ncclDataType_t from, unsigned hidden, ncclDataType_t scale_type, unsigned block);
// Any format whose rows, with their scales, have at most `most_bytes`, a multiple of 16.
RefFormat ref_format_draw(uint64_t seed, unsigned most_bytes);
void ref_format_name(const RefFormat* format, char* text, size_t bytes);

size_t ref_format_in_bytes(const RefFormat* format);     // of a row that is read
size_t ref_format_out_bytes(const RefFormat* format);    // of a row that arrives
size_t ref_format_scale_bytes(const RefFormat* format);  // of a row's scales
// Of a row that arrives and its scales, padded to 16: what token_size_bytes must be at least.
size_t ref_format_slot_bytes(const RefFormat* format);

// A value of config.round_scales for the format: anything where it has no effect.
unsigned ref_format_rounds(const RefFormat* format, unsigned variation);

// The strides of a tensor of scales [parts, rows, num_scales], and the bytes of its memory.
void ref_scale_strides(const RefFormat* format, RefOrder order, unsigned rows, unsigned strides[3]);
size_t ref_scale_memory(const RefFormat* format, RefOrder order, RefLayout layout);
// Adds the tensor to a list.
void ref_list_add_scales(RefList* list, const RefBuffer* buffer, const RefFormat* format,
                         RefOrder order, RefLayout layout);
// Adds a tensor of rows of `hidden` elements.
void ref_list_add_rows(RefList* list, const RefBuffer* buffer, ncclDataType_t datatype,
                       unsigned hidden, RefLayout layout);

// Fills the inputs of `rank`: `tokens` rows and, where they are forwarded, their scales.
void ref_format_fill(const RefFormat* format, uint64_t seed, unsigned rank, unsigned tokens,
                     const RefBuffer* rows, const RefBuffer* scales);
// Writes what must arrive for the row `number`, ref_row_of(source, token), to row `row` of
// tensors of that layout. Either may be NULL.
void ref_format_place(const RefFormat* format, uint64_t seed, uint64_t number, RefLayout layout,
                      size_t row, void* out, void* out_scales);
// Writes zeros there.
void ref_format_clear(const RefFormat* format, RefLayout layout, size_t row, void* out, void* out_scales);

__END_DECLS
