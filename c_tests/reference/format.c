// Formats of rows, and the rows themselves; see format.h.
#include "reference/format.h"

#include "reference/cast.h"

enum { kE4m3 = 10, kPiece = 16, kMostSpare = 5 };

static unsigned blocks_of(unsigned hidden, unsigned block) { return (hidden + block - 1) / block; }

RefFormat ref_format_opaque(ncclDataType_t datatype, unsigned hidden) {
    RefFormat format;
    memset(&format, 0, sizeof(format));
    format.from = datatype;
    format.to = datatype;
    format.hidden = hidden;
    format.scale_type = ncclFloat32;
    return format;
}

RefFormat ref_format_forward(ncclDataType_t datatype, unsigned hidden, ncclDataType_t scale_type, unsigned num_scales) {
    RefFormat format = ref_format_opaque(datatype, hidden);
    format.meaning = kRefForward;
    format.scale_type = scale_type;
    format.num_scales = num_scales;
    return format;
}

RefFormat ref_format_cast(ncclDataType_t from, unsigned hidden, ncclDataType_t scale_type, unsigned block) {
    RefFormat format = ref_format_opaque(from, hidden);
    format.meaning = kRefCast;
    format.to = (ncclDataType_t)kE4m3;
    format.scale_type = scale_type;
    format.block = block;
    const bool packed = scale_type == ncclInt32 || scale_type == ncclUint32;
    format.num_scales = blocks_of(hidden, packed ? 4 * block : block);
    return format;
}

size_t ref_format_in_bytes(const RefFormat* format) { return format->hidden * ep_datatype_size(format->from); }

size_t ref_format_out_bytes(const RefFormat* format) { return format->hidden * ep_datatype_size(format->to); }

size_t ref_format_scale_bytes(const RefFormat* format) {
    return format->num_scales * ep_datatype_size(format->scale_type);
}

size_t ref_format_slot_bytes(const RefFormat* format) {
    const size_t scales = ref_format_scale_bytes(format);
    return ref_format_out_bytes(format) + (scales + kPiece - 1) / kPiece * kPiece;
}

unsigned ref_format_rounds(const RefFormat* format, unsigned variation) {
    const bool chosen = format->meaning == kRefCast && format->scale_type == ncclFloat32;
    if (format->meaning == kRefForward || (chosen && !format->round)) return 0;
    return chosen ? 1 + variation % 3 : variation % 3;
}

// ---- Random formats ----------------------------------------------------------------------------

static RefFormat draw_forward(uint64_t* state, unsigned most_bytes) {
    static const ncclDataType_t kScales[] = {ncclFloat32, ncclUint8,  ncclInt8,
                                             ncclFloat16, ncclUint32, (ncclDataType_t)kE4m3};
    const ncclDataType_t datatype = (ncclDataType_t)ep_random_below(state, 12);
    const ncclDataType_t scale_type = kScales[ep_random_below(state, 6)];
    const unsigned pieces = most_bytes / kPiece;
    const unsigned of_scales = 1 + (unsigned)ep_random_below(state, pieces > 2 ? pieces / 2 : 1);
    const unsigned of_rows = 1 + (unsigned)ep_random_below(state, pieces - of_scales);
    const unsigned most = of_scales * kPiece / (unsigned)ep_datatype_size(scale_type);
    return ref_format_forward(datatype, of_rows * kPiece / (unsigned)ep_datatype_size(datatype),
                              scale_type, 1 + (unsigned)ep_random_below(state, most));
}

static RefFormat draw_cast(uint64_t* state, unsigned most_bytes) {
    static const ncclDataType_t kFrom[] = {ncclBfloat16, ncclBfloat16, ncclFloat16, ncclFloat32};
    static const ncclDataType_t kScales[] = {ncclFloat32, ncclUint8, ncclInt32, ncclUint32};
    static const ncclDataType_t kTo[] = {(ncclDataType_t)kE4m3, ncclUint8, ncclInt8};
    const ncclDataType_t from = kFrom[ep_random_below(state, 4)];
    const ncclDataType_t scale_type = kScales[ep_random_below(state, 4)];
    const bool small = scale_type != ncclFloat32 && ep_random_below(state, 2) == 0;
    unsigned hidden = kPiece * (1 + (unsigned)ep_random_below(state, most_bytes / kPiece - 1));
    // Where the numbers of scales are the same, the library takes blocks of 128.
    const unsigned least_small = scale_type == ncclUint8 ? 33 : 129;
    RefFormat format;
    do {
        format = ref_format_cast(from, hidden, scale_type, small && hidden >= least_small ? 32 : 128);
        hidden -= kPiece;
    } while (ref_format_slot_bytes(&format) > most_bytes);
    format.round = ep_random_below(state, 2) == 0;
    format.to = kTo[ep_random_below(state, 3)];
    return format;
}

RefFormat ref_format_draw(uint64_t seed, unsigned most_bytes) {
    uint64_t state = seed;
    const unsigned kind = most_bytes < 2 * kPiece ? 0 : (unsigned)ep_random_below(&state, 5);
    RefFormat format;
    if (kind == 0) {
        const ncclDataType_t datatype = (ncclDataType_t)ep_random_below(&state, 12);
        const unsigned bytes = kPiece * (1 + (unsigned)ep_random_below(&state, most_bytes / kPiece));
        format = ref_format_opaque(datatype, bytes / (unsigned)ep_datatype_size(datatype));
    } else {
        format = kind < 3 ? draw_forward(&state, most_bytes) : draw_cast(&state, most_bytes);
    }
    format.in_order = (RefOrder)ep_random_below(&state, kRefNumOrders);
    format.out_order = (RefOrder)ep_random_below(&state, kRefNumOrders);
    format.spare = (unsigned)ep_random_below(&state, kMostSpare);
    return format;
}

void ref_format_name(const RefFormat* format, char* text, size_t bytes) {
    static const char* const kMeanings[] = {"opaque", "forward", "cast"};
    static const char* const kOrders[] = {"dense", "row pitch", "columns"};
    snprintf(text, bytes, "%s, %u x type %d to type %d, %u scales of type %d in blocks of %u%s, %s to %s, %u spare",
             kMeanings[format->meaning], format->hidden, (int)format->from, (int)format->to, format->num_scales,
             (int)format->scale_type, format->block, format->round ? " rounded" : "", kOrders[format->in_order],
             kOrders[format->out_order], format->spare);
}

// ---- Tensors of scales -------------------------------------------------------------------------

void ref_scale_strides(const RefFormat* format, RefOrder order, unsigned rows, unsigned strides[3]) {
    const unsigned spare = order == kRefDense ? 0 : format->spare;
    if (order == kRefColumns) {
        strides[2] = rows + spare;
        strides[1] = 1;
        strides[0] = format->num_scales * strides[2] + spare;
    } else {
        strides[2] = 1;
        strides[1] = format->num_scales + spare;
        strides[0] = rows * strides[1] + spare;
    }
}

size_t ref_scale_memory(const RefFormat* format, RefOrder order, RefLayout layout) {
    unsigned strides[3];
    ref_scale_strides(format, order, layout.rows, strides);
    const size_t parts = layout.parts == 0 ? 1 : layout.parts;
    return parts * strides[0] * ep_datatype_size(format->scale_type);
}

void ref_list_add_scales(RefList* list, const RefBuffer* buffer, const RefFormat* format,
                         RefOrder order, RefLayout layout) {
    unsigned sizes[3];
    const unsigned count = ref_layout_sizes(layout, format->num_scales, sizes);
    ref_list_add(list, ref_buffer_data(buffer), format->scale_type, NCCL_EP_TENSOR_TAG_SCALES, count, sizes);
    if (order == kRefDense) return;
    unsigned strides[3];
    ref_scale_strides(format, order, layout.rows, strides);
    ref_list_set_strides(list, &strides[3 - count]);
}

void ref_list_add_rows(RefList* list, const RefBuffer* buffer, ncclDataType_t datatype,
                       unsigned hidden, RefLayout layout) {
    unsigned sizes[3];
    const unsigned count = ref_layout_sizes(layout, hidden, sizes);
    ref_list_add(list, ref_buffer_data(buffer), datatype, NCCL_EP_TENSOR_TAG_TOKENS, count, sizes);
}

static void put_scales(const RefFormat* format, RefOrder order, RefLayout layout, size_t row,
                       const void* scales, void* memory) {
    unsigned strides[3];
    ref_scale_strides(format, order, layout.rows, strides);
    const size_t first = row / layout.rows * (size_t)strides[0] + row % layout.rows * (size_t)strides[1];
    const size_t width = ep_datatype_size(format->scale_type);
    for (size_t i = 0; i < format->num_scales; ++i) {
        const size_t element = first + i * strides[2];
        memcpy((char*)memory + element * width, (const char*)scales + i * width, width);
    }
}

// ---- Rows --------------------------------------------------------------------------------------

static void source_row(const RefFormat* format, uint64_t seed, uint64_t number, void* row) {
    if (format->meaning == kRefCast) {
        ref_cast_input(format, seed, number, row);
        return;
    }
    const RefRows rows = {format->from, format->hidden, seed, true};  // moved as they are
    ref_row_fill(&rows, number, row);
}

static void source_scales(const RefFormat* format, uint64_t seed, uint64_t number, void* scales) {
    uint64_t state = ep_mix(seed, number, 3);
    unsigned char* to = scales;
    for (size_t i = 0; i < ref_format_scale_bytes(format); ++i) to[i] = (uint8_t)ep_random(&state);
}

void ref_format_fill(const RefFormat* format, uint64_t seed, unsigned rank, unsigned tokens,
                     const RefBuffer* rows, const RefBuffer* scales) {
    EP_SCOPED unsigned char* host = ref_host_new(rows->bytes);
    EP_SCOPED unsigned char* host_scales = ref_host_poison(scales->bytes);
    EP_SCOPED void* row_scales = ref_host_new(ref_format_scale_bytes(format));
    for (size_t token = 0; token < tokens; ++token) {
        const uint64_t number = ref_row_of(rank, token);
        source_row(format, seed, number, host + token * ref_format_in_bytes(format));
        if (format->meaning != kRefForward) continue;
        source_scales(format, seed, number, row_scales);
        put_scales(format, format->in_order, ref_flat(tokens), token, row_scales, host_scales);
    }
    ref_buffer_upload(rows, host);
    ref_buffer_upload(scales, host_scales);
}

void ref_format_place(const RefFormat* format, uint64_t seed, uint64_t number, RefLayout layout,
                      size_t row, void* out, void* out_scales) {
    const size_t bytes = ref_format_out_bytes(format);
    EP_SCOPED void* scales = ref_host_new(ref_format_scale_bytes(format));
    EP_SCOPED unsigned char* payload = ref_host_new(bytes);
    if (format->meaning == kRefCast) {
        EP_SCOPED void* source = ref_host_new(ref_format_in_bytes(format));
        source_row(format, seed, number, source);
        ref_cast_row(format, source, payload, scales);
    } else {
        source_row(format, seed, number, payload);
        source_scales(format, seed, number, scales);
    }
    if (out != NULL) memcpy((char*)out + row * bytes, payload, bytes);
    if (out_scales != NULL) put_scales(format, format->out_order, layout, row, scales, out_scales);
}

void ref_format_clear(const RefFormat* format, RefLayout layout, size_t row, void* out, void* out_scales) {
    const size_t bytes = ref_format_out_bytes(format);
    if (out != NULL) memset((char*)out + row * bytes, 0, bytes);
    if (out_scales == NULL) return;
    EP_SCOPED void* scales = ref_host_new(ref_format_scale_bytes(format));
    put_scales(format, format->out_order, layout, row, scales, out_scales);
}
