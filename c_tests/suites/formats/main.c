// Dispatches of rows in every format: opaque, with scales that are forwarded, and cast to e4m3; in both modes, staged
// and cached, with scales in every order. Every byte of rows and scales is compared with a reference; what lies between
// is poison and stays so. Combines between them keep their own rows.
#include "reference/cast.h"
#include "reference/run.h"

enum { kMaxTokens = 9, kTopK = 4, kLocalExperts = 2, kEveryHidden = 4096, kEveryTokens = 16 };

static const ncclDataType_t kE4m3 = (ncclDataType_t)10;

// ---- One format in each mode -------------------------------------------------------------------

static unsigned largest(const RefFormat* format) {
    const size_t slot = ref_format_slot_bytes(format);
    return (unsigned)(slot > 64 ? slot : 64);
}

static RefRun open_run(EpEnv* env, const RefFormat* format, unsigned tokens, RefOpening opening) {
    const unsigned experts = kLocalExperts * (unsigned)env->size;
    const ncclEpAlgorithm_t algorithm = opening.ht ? NCCL_EP_ALGO_HIGH_THROUGHPUT : NCCL_EP_ALGO_LOW_LATENCY;
    const RefShape shape = {experts, tokens, kTopK, ncclBfloat16, 16};
    ncclEpGroup_t group = ep_group_create(env, algorithm, experts, tokens, largest(format));
    const RefStyle style = opening.ht && format->every_bf16 ? kRefDistinct : kRefMessy;
    RefRun run = ref_run_open_with(env, group, &shape, style, !format->every_bf16, opening);
    run.own_group = group;
    run.variation = (unsigned)opening.seed;
    ref_run_set_format(&run, format);
    return run;
}

// Blocking, staged, and after other rows have been combined.
static void in_low_latency(EpEnv* env, const RefFormat* format, unsigned tokens, uint64_t seed) {
    REF_SCOPED RefRun run = open_run(env, format, tokens, ref_ll(seed));
    ref_pair(&run);
    ref_prepare_dispatch(&run);
    EP_CHECK_NCCL(ref_launch_dispatch(&run, kRefStaged, env->stream));
    ep_sync(env);
    ref_overwrite_inputs(&run);
    EP_CHECK_NCCL(ncclEpComplete(run.handle, NULL, env->stream));
    ref_check_dispatch(&run);
    ref_combine(&run);
}

// Forward, cached, and forward without rows, where the format allows that.
static void in_high_throughput(EpEnv* env, const RefFormat* format, unsigned tokens, uint64_t seed) {
    REF_SCOPED RefRun run = open_run(env, format, tokens, ref_ht_as((HtRows)(seed % 3), kHtNoCounter, seed));
    ref_dispatch(&run);
    ref_combine_as(&run, kRefBackward);
    ref_dispatch_as(&run, kRefCached);
    if (format->meaning != kRefCast) ref_dispatch_as(&run, (RefPass){.no_tokens = true});
}

static void in_both_modes(EpEnv* env, const RefFormat* format, uint64_t seed) {
    const uint64_t failed = ep_failed();
    in_low_latency(env, format, kMaxTokens, seed);
    if (ep_has_high_throughput(env)) in_high_throughput(env, format, kMaxTokens, seed);
    if (ep_failed() == failed) return;
    char name[256];
    ref_format_name(format, name, sizeof(name));
    fprintf(stderr, "[rank %d] differs: %s\n", env->rank, name);
}

// ---- Cases -------------------------------------------------------------------------------------

EP_TEST(opaque_rows) {
    for (unsigned datatype = 0; datatype < 12; ++datatype) {
        const unsigned width = (unsigned)ep_datatype_size((ncclDataType_t)datatype);
        const RefFormat format = ref_format_opaque((ncclDataType_t)datatype, 272 / width);
        in_both_modes(env, &format, datatype);
    }
}

EP_TEST(forwarded_scales) {
    static const ncclDataType_t kScales[] = {ncclFloat32, ncclUint8, ncclFloat16, ncclInt32};
    static const unsigned kCounts[] = {1, 3, 23, 56};
    for (unsigned i = 0; i < COUNT(kScales) * COUNT(kCounts); ++i) {
        const ncclDataType_t scales = kScales[i / COUNT(kCounts)];
        RefFormat format = ref_format_forward(i % 2 == 0 ? kE4m3 : ncclUint8, 144, scales, kCounts[i % 4]);
        format.in_order = (RefOrder)(i % kRefNumOrders);
        format.out_order = (RefOrder)(i / 3 % kRefNumOrders);
        format.spare = i % 4;
        in_both_modes(env, &format, 100 + i);
    }
}

// As formats that models use are forwarded: FP4 with e4m3 scales of 16, and rows with one scale.
EP_TEST(formats_of_models) {
    const RefFormat formats[] = {
        ref_format_forward(ncclUint8, 3584, kE4m3, 448),    ref_format_forward(ncclUint8, 3584, ncclUint8, 224),
        ref_format_forward(kE4m3, 2880, ncclFloat32, 23),   ref_format_forward(kE4m3, 7168, ncclUint8, 56),
        ref_format_forward(ncclInt8, 7168, ncclFloat32, 1),
    };
    for (unsigned i = 0; i < COUNT(formats); ++i) in_both_modes(env, &formats[i], 200 + i);
}

EP_TEST(casts) {
    static const ncclDataType_t kFrom[] = {ncclBfloat16, ncclFloat16, ncclFloat32};
    static const ncclDataType_t kTo[] = {(ncclDataType_t)10, ncclUint8, ncclInt8};
    static const unsigned kHidden[] = {16, 128, 144, 2880, 7168};
    static const struct {
        ncclDataType_t scales;
        unsigned block, least_hidden;
    } kCasts[] = {{ncclFloat32, 128, 1}, {ncclUint8, 128, 1},   {ncclUint8, 32, 33},
                  {ncclInt32, 128, 1},   {ncclUint32, 32, 129}};
    unsigned seed = 300;
    for (unsigned cast = 0; cast < COUNT(kCasts); ++cast) {
        for (unsigned i = 0; i < COUNT(kHidden); ++i, ++seed) {
            if (kHidden[i] < kCasts[cast].least_hidden) continue;
            RefFormat format = ref_format_cast(kFrom[seed % 3], kHidden[i], kCasts[cast].scales, kCasts[cast].block);
            format.to = kTo[seed / 3 % 3];
            format.round = seed % 2 == 0;
            format.out_order = (RefOrder)(seed % kRefNumOrders);
            format.spare = seed % 5;
            in_both_modes(env, &format, seed);
        }
    }
}

// Rows and scales that do not fit the shared memory of a GPU's warp at once. In high throughput alone.
EP_TEST_HT(long_rows_ht) {
    const RefFormat formats[] = {
        ref_format_forward(ncclUint8, 144, ncclFloat32, 9001),
        ref_format_forward(ncclInt8, 35008, ncclFloat16, 300),
        ref_format_cast(ncclBfloat16, 20016, ncclFloat32, 128),
        ref_format_cast(ncclFloat32, 20016, ncclUint8, 32),
    };
    for (unsigned i = 0; i < COUNT(formats); ++i) in_high_throughput(env, &formats[i], kMaxTokens, 600 + i);
}

// All numbers of bfloat16: in order, mixed, and below powers of two. Few enough rows for every rank
// to check them in seconds.
static RefFormat every_number(unsigned i) {
    const bool small = i % 4 == 3;
    RefFormat format = ref_format_cast(ncclBfloat16, kEveryHidden, small ? ncclUint8 : ncclFloat32, small ? 32 : 128);
    format.round = i % 2 == 1;
    format.every_bf16 = true;
    return format;
}

EP_TEST(all_bfloat16) {
    for (unsigned i = 0; i < 8; ++i) {
        const RefFormat format = every_number(i);
        in_low_latency(env, &format, kEveryTokens, 4 * 97 * i + i);
    }
}

// High throughput has loops of its own around the same cast. Every token travels, and each dispatch has the next seed,
// and so another order of the numbers.
EP_TEST_HT(all_bfloat16_ht) {
    const RefFormat first = every_number(0);
    REF_SCOPED RefRun run = open_run(env, &first, kEveryTokens, ref_ht_as(kHtRowsExact, kHtNoCounter, 0));
    for (unsigned i = 0; i < 4; ++i) {
        const RefFormat format = every_number(i);
        ref_run_set_format(&run, &format);
        ref_dispatch_as(&run, i == 0 ? kRefWhole : kRefCached);
    }
}

// The layout that block-scaled matrix products read: columns with a pitch of whole 16 bytes.
EP_TEST(columns_for_matrix_products) {
    const unsigned rows = kMaxTokens * (unsigned)env->size;
    RefFormat format = ref_format_cast(ncclBfloat16, 7168, ncclFloat32, 128);
    format.out_order = kRefColumns;
    format.spare = (4 - rows % 4) % 4;
    in_both_modes(env, &format, 500);
    RefFormat packed = ref_format_cast(ncclBfloat16, 7168, ncclInt32, 128);
    packed.out_order = kRefColumns;
    packed.spare = format.spare;
    in_both_modes(env, &packed, 501);
}

// What the reference says of numbers whose cast is known.
EP_TEST(known_casts) {
    (void)env;
    static const struct {
        float value;
        uint8_t code;
    } kKnown[] = {{0.0f, 0},         {-0.0f, 0x80},     {448.0f, 0x7e},   {-448.0f, 0xfe},
                  {1e9f, 0x7e},      {1.0f, 0x38},      {0.0625f, 0x18},  {17.0f, 0x58},
                  {19.0f, 0x5a},     {0.001953125f, 1}, {0.0009765625f, 0}, {0.002929688f, 2}};
    for (unsigned i = 0; i < COUNT(kKnown); ++i) EP_CHECK_EQ_U64(ref_e4m3(kKnown[i].value), kKnown[i].code);
}
