// Refusals of high-throughput dispatch and combine: the rules of each tensor, forward and backward.
// These calls are local: refusing one leaves no rank waiting.
#include "suites/errors/errors.h"

static const BrokenCall kForwardDispatch[] = {
    {"dispatch-ht-in-required"}, {"dispatch-ht-in-ndim"}, {"dispatch-ht-in-datatype"}, {"dispatch-ht-in-row"},
    {"dispatch-ht-in-row", "got 24 bytes, expected a multiple of 16 bytes"}, {"dispatch-ht-in-row-most"},
    {"dispatch-ht-in-rows"}, {"dispatch-ht-in-data"}, {"dispatch-ht-in-align"}, {"dispatch-ht-out-ndim"},
    {"dispatch-ht-out-datatype"},
    {"dispatch-ht-out-datatype", "got bfloat16, expected float16", "inputs[TOKENS].datatype: (got float16"},
    {"dispatch-ht-out-hidden"}, {"dispatch-ht-out-data"}, {"dispatch-ht-out-align"}, {"dispatch-ht-in-ids-ndim"},
    {"dispatch-ht-in-ids-datatype"}, {"dispatch-ht-in-ids-columns"}, {"dispatch-ht-in-ids-rows"},
    {"dispatch-ht-in-ids-data"}, {"dispatch-ht-in-ids-align"}, {"dispatch-ht-in-weights-required"},
    {"dispatch-ht-in-weights-ndim"}, {"dispatch-ht-in-weights-datatype"}, {"dispatch-ht-in-weights-columns"},
    {"dispatch-ht-in-weights-rows"}, {"dispatch-ht-in-weights-data"}, {"dispatch-ht-in-weights-align"},
    {"dispatch-ht-out-ids-required"}, {"dispatch-ht-out-ids-ndim"}, {"dispatch-ht-out-ids-datatype"},
    {"dispatch-ht-out-ids-columns"}, {"dispatch-ht-out-ids-data"}, {"dispatch-ht-out-ids-align"},
    {"dispatch-ht-out-weights-required"}, {"dispatch-ht-out-weights-ndim"}, {"dispatch-ht-out-weights-datatype"},
    {"dispatch-ht-out-weights-columns"}, {"dispatch-ht-out-weights-rows", "got 1, expected *"},
    {"dispatch-ht-out-weights-data"}, {"dispatch-ht-out-weights-align"}, {"dispatch-ht-counter-ndim"},
    {"dispatch-ht-counter-datatype"}, {"dispatch-ht-counter-size"}, {"dispatch-ht-counter-data"},
    {"dispatch-ht-counter-align"},
};

static const BrokenCall kTokensOnlyDispatch[] = {
    {"dispatch-ht-only-in-weights"}, {"dispatch-ht-only-out-ids"}, {"dispatch-ht-only-out-weights"},
};

static const BrokenCall kForwardCombine[] = {
    {"combine-ht-in-required"}, {"combine-ht-in-ndim"}, {"combine-ht-in-datatype"},
    {"combine-ht-in-sum", "got int32, expected bfloat16, float16 or float32"}, {"combine-ht-in-sum"},
    {"combine-ht-in-row"}, {"combine-ht-in-row", "got 24 bytes, expected a multiple of 16 bytes"},
    {"combine-ht-in-row-most"}, {"combine-ht-in-data"}, {"combine-ht-in-align"}, {"combine-ht-in-scales"},
    {"combine-ht-out-scales"}, {"combine-ht-out-required"}, {"combine-ht-out-ndim"}, {"combine-ht-out-rows"},
    {"combine-ht-out-datatype"}, {"combine-ht-out-hidden"}, {"combine-ht-out-data"}, {"combine-ht-out-align"},
};

static const BrokenCall kBackwardCombine[] = {
    {"combine-ht-in-weights-ndim"}, {"combine-ht-in-weights-datatype"},
    {"combine-ht-in-weights-rows", "got 1, expected *"}, {"combine-ht-in-weights-columns"},
    {"combine-ht-in-weights-data"}, {"combine-ht-in-weights-align"}, {"combine-ht-out-weights-required"},
    {"combine-ht-out-weights-ndim"}, {"combine-ht-out-weights-datatype"}, {"combine-ht-out-weights-rows"},
    {"combine-ht-out-weights-columns"}, {"combine-ht-out-weights-data"}, {"combine-ht-out-weights-align"},
};

HT_SESSION_TEST(ht_dispatch_arguments) {
    check_broken_calls(session, kDispatch, kForwardDispatch, COUNT(kForwardDispatch));
    check_broken_calls(session, kTokensOnly, kTokensOnlyDispatch, COUNT(kTokensOnlyDispatch));
}

HT_SESSION_TEST(ht_combine_arguments) {
    check_works(session);
    check_broken_calls(session, kCombine, kForwardCombine, COUNT(kForwardCombine));
    check_broken_calls(session, kBackward, kBackwardCombine, COUNT(kBackwardCombine));
}
