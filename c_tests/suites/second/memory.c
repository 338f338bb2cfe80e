// Handles in memory of callers: what a handle keeps is one block of bytes, which works wherever it lies. Also in
// exchanges.c, where high throughput goes on with a copy.
#define _GNU_SOURCE  // fdopen
#include <stdlib.h>
#include <unistd.h>

#include "harness/graphs.h"
#include "harness/nodes.h"
#include "suites/second/run.h"

// Combined where the bytes of the dispatch are by then.
EP_TEST(a_combine_works_where_its_memory_is) {
    if (!ranks_share_a_node()) return;
    Run run;
    Case test = kSmallLl;
    test.uneven = true;
    test.in_memory = true;
    for (test.kind = kLlExperts; test.kind <= kLlRanks; ++test.kind) {
        run_open(&run, env, NULL, &test, 710 + test.kind);
        run_route(&run);
        EP_CHECK_NCCL(run_dispatch(&run, NCCL_EP_FWD_PASS));
        run_check_dispatch(&run, NCCL_EP_FWD_PASS);
        run_move(&run);
        EP_CHECK_NCCL(run_update(&run));  // which low latency keeps on the host
        EP_CHECK_NCCL(run_combine(&run, NCCL_EP_FWD_PASS));
        run_check_combine(&run, NCCL_EP_FWD_PASS);
        run_close(&run);
    }
}

static void play(void* context) {
    const Run* run = context;
    EP_CHECK_NCCL(run_dispatch(run, NCCL_EP_FWD_PASS));
    EP_CHECK_NCCL(run_combine(run, NCCL_EP_BWD_PASS));
}

// A replay goes by what lies in the memory then: nothing of a routing is in the graph. Over several nodes the host
// reads it.
EP_TEST(a_graph_follows_the_memory) {
    if (!ranks_share_a_node()) return;
    Run run;
    Case test = kSmallHt;
    test.recv_rows = (unsigned)env->size * test.max_tokens;
    test.in_memory = true;
    run_open(&run, env, NULL, &test, 720);
    run_init(&run);
    Run routed = run;  // another handle of the same tensors
    run_init(&routed);
    const EpCaptured captured = ep_capture(env->stream, play, &run);
    for (unsigned i = 0; i < 3; ++i) {
        run_renew(&run, 730 + i);
        EP_CHECK_NCCL(run_update(&routed));
        EP_CHECK_CUDA(cudaMemcpyAsync(ref_buffer_data(&run.memory), ref_buffer_data(&routed.memory), run.memory.bytes,
                                      cudaMemcpyDefault, env->stream));
        ep_sync(env);
        run_poison(&run);
        ep_replay(&captured);
        run_check_dispatch(&run, NCCL_EP_FWD_PASS);
        run_check_combine(&run, NCCL_EP_BWD_PASS);
    }
    ep_release_captured(&captured);
    run_end_handle(&routed);
    run_close(&run);
}

// Without a bound a dispatch has room for what comes by the routing in the memory, though the handle's own is another.
EP_TEST(rows_are_those_of_the_memory) {
    Case few = kSmallHt, many = kSmallHt;
    few.in_memory = many.in_memory = true;
    few.alignment = many.alignment = 4;
    many.style = kRefOneRank;
    for (few.kind = kHtFlat; few.kind <= kHtZones; ++few.kind) {
        many.kind = few.kind;
        Run before, run;
        run_open(&before, env, NULL, &many, 750);
        run_route(&before);
        run_open(&run, env, before.group, &few, 751);
        run_route(&run);
        EP_CHECK_CUDA(cudaMemcpyAsync(ref_buffer_data(&before.memory), ref_buffer_data(&run.memory), run.memory.bytes,
                                      cudaMemcpyDefault, env->stream));
        const ncclEpHandle_t own = run.handle;
        run.handle = before.handle;
        EP_CHECK_NCCL(run_dispatch(&run, NCCL_EP_FWD_PASS));
        EP_CHECK_NCCL(run_combine(&run, NCCL_EP_BWD_PASS));
        run_check_dispatch(&run, NCCL_EP_FWD_PASS);
        run_check_combine(&run, NCCL_EP_BWD_PASS);
        run.handle = own;
        run_close(&run);
        run_close(&before);
    }
}

// One rank has one row too few in a tensor beside its rows.
static void expect_too_few(const EpEnv* env, unsigned tensor, const char* words) {
    const bool is_short = env->rank == env->size - 1;
    Run run;
    Call call;
    Case test = kSmallHt;
    test.kind = kHtZones;
    test.alignment = 4;
    test.style = kRefOneRank;
    test.in_memory = true;
    test.scaled = tensor == kScalesOut;
    run_open(&run, env, NULL, &test, 755);
    run_route(&run);
    run_move(&run);
    const bool combines = tensor == kResults || tensor == kGradientsIn;
    call_set(&call, &run, combines ? NCCL_EP_BWD_PASS : NCCL_EP_FWD_PASS);
    if (is_short) call.views[tensor].sizes[0] = run.received - 1;
    // The others may have heard of it by then.
    const ncclResult_t result =
        combines ? ncclEpCombine(run.handle, &call.combine_inputs, &call.combine_outputs, &call.combine_config,
                                 env->stream)
                 : ncclEpDispatch(run.handle, &call.inputs, &call.outputs, &call.info, &call.config, env->stream);
    EP_CHECK(result == ncclSuccess || (!is_short && result == ncclRemoteError));
    ep_sync(env);
    forget_lines();
    if (is_short) {
        CHECK_REFUSED(run_update(&run), ncclInvalidUsage, words);
    }
    run_close(&run);
}

// The first operation on a copy of a routing finds out by itself what comes.
EP_TEST(the_tensor_that_is_too_short_is_named) {
    expect_too_few(env, kReceived, "outputs.tokens.sizes[0]: must hold all tokens that this rank receives");
    expect_too_few(env, kWeightsOut, "outputs.topk_weights.sizes[0]: must hold all tokens that this rank receives");
    expect_too_few(env, kScalesOut, "outputs.scales.sizes[0]: must hold all tokens that this rank receives");
    expect_too_few(env, kResults, "inputs.tokens.sizes[0]: must hold all tokens that this rank receives");
    expect_too_few(env, kGradientsIn, "inputs.topk_weights.sizes[0]: must hold all tokens that this rank receives");
}

// Where the stream has not come to the memory for long, the operation finds out what comes.
EP_TEST(rows_in_memory_are_not_waited_for_without_end) {
    if (!ep_on_host_backend()) return;
    EP_WITH_VARIABLE("NCCL_EP_TIMEOUT_MS", "500");
    Run run;
    Case test = kSmallHt;
    test.in_memory = true;
    run_open(&run, env, NULL, &test, 760);
    run_route(&run);
    EpGate gate;
    ep_barrier();
    ep_gate_close(&gate, env->stream);
    const double start = ep_seconds();
    EP_CHECK_NCCL(run_dispatch(&run, NCCL_EP_FWD_PASS));
    const double waited = ep_seconds() - start;
    EP_CHECK(waited >= 1.0 && waited < 2.0);
    ep_gate_open(&gate);
    run_check_dispatch(&run, NCCL_EP_FWD_PASS);
    run_close(&run);
}

// A file of choices that no operation can follow here, as its warning tells that it was asked.
static FILE* write_choices(const EpEnv* env, char path[kPathBytes]) {
    FILE* file = fdopen(make_file(path), "w");
    EP_REQUIRE(file != NULL);
    fprintf(file,
            "{\"format\": \"nccl_ep tuning\", \"version\": 1, \"gpu\": \"CPU\", \"ranks\": %d, \"entries\": [], "
            "\"choices\": [{\"operation\": \"ht_dispatch\", \"tokens\": 4096, \"variant\": \"ht.direct\"},"
            " {\"operation\": \"ht_combine\", \"tokens\": 4096, \"variant\": \"ht.pull\"}]}",
            env->size);
    EP_REQUIRE(fflush(file) == 0);
    return file;
}

// Also for the first operation on memory whose routing another handle has made.
EP_TEST(choices_are_made_for_memory_of_others) {
    if (!ep_on_host_backend() || !ranks_share_a_node()) return;
    char path[kPathBytes];
    FILE* file = write_choices(env, path);
    EP_WITH_VARIABLE("NCCL_EP_TUNING_FILE", path);
    Run run;
    Case test = kSmallHt;
    test.in_memory = true;
    for (int combines = 0; combines < 2; ++combines) {
        run_open(&run, env, NULL, &test, 770);
        run_route(&run);
        run_move(&run);
        forget_lines();
        if (combines) {
            CHECK_REFUSED(run_combine(&run, NCCL_EP_FWD_PASS), ncclSuccess, "a choice for ht_combine is passed over");
        } else {
            CHECK_REFUSED(run_dispatch(&run, NCCL_EP_FWD_PASS), ncclSuccess, "a choice for ht_dispatch is passed over");
        }
        ep_sync(env);
        run_close(&run);
    }
    EP_CHECK(fclose(file) == 0);
}

// What is in memory that holds no routing of such a handle.
typedef enum { kNoRouting, kFewerTokens, kOtherAlignment, kDamagedNumbers } Foreign;

// Over nodes the numbers that the host has of a handle lie behind the header of 20 words and two more.
static void damage_numbers(Run* run) {
    const uint32_t no_number = UINT32_MAX - 7;
    char* numbers = (char*)ref_buffer_data(&run->memory) + 22 * sizeof(uint32_t);
    EP_CHECK_CUDA(cudaMemcpyAsync(numbers, &no_number, sizeof(no_number), cudaMemcpyDefault, run->env->stream));
    ep_sync(run->env);
}

// It is not followed: the group fails.
static void expect_foreign(const EpEnv* env, Case test, Foreign foreign) {
    const bool is_routed = foreign != kNoRouting;
    const unsigned fewer = foreign == kFewerTokens ? 1 : 0;
    Run run;
    test.in_memory = true;
    run_open(&run, env, NULL, &test, 740);
    is_routed ? run_route(&run) : run_init(&run);
    ep_sync(env);
    ep_barrier();  // a failure also ends a routing that is still under way
    if (foreign == kOtherAlignment) test.alignment *= 2;
    if (is_routed) run_move(&run);
    if (foreign == kDamagedNumbers) damage_numbers(&run);
    run.num_tokens -= fewer;
    if (is_ll(&test)) EP_CHECK_NCCL(run_update(&run));
    // Another rank may have failed before.
    (void)run_combine(&run, NCCL_EP_FWD_PASS);
    EP_CHECK_CUDA(cudaStreamSynchronize(env->stream));
    ep_barrier();
    forget_lines();
    const char* words[] = {[kNoRouting] = "holds no routing of a handle like this one (got word ",
                           [kFewerTokens] = "holds no routing of a handle like this one (got tokens ",
                           [kOtherAlignment] = "(got kept ids of 64 bits in zones aligned to 4, expected ",
                           [kDamagedNumbers] = "holds no routing of a handle like this one (got word "};
    CHECK_REFUSED(run_combine(&run, NCCL_EP_FWD_PASS), ncclInvalidUsage, words[foreign]);
    run.num_tokens += fewer;
    run_end_handle(&run);
    (void)ncclEpGroupDestroy(run.own_group);  // it may tell of the failure
    run.own_group = NULL;
    run_close(&run);
}

EP_TEST(memory_without_a_routing_is_not_followed) { expect_foreign(env, kSmallHt, kNoRouting); }
EP_TEST(memory_with_other_tokens_is_not_followed) { expect_foreign(env, kSmallHt, kFewerTokens); }
EP_TEST(memory_of_another_alignment_is_not_followed) {
    Case test = kSmallHt;
    test.kind = kHtZones;
    test.alignment = 4;
    expect_foreign(env, test, kOtherAlignment);
}
EP_TEST(memory_with_damaged_numbers_is_not_followed) {
    if (ep_num_nodes() > 1 && !ep_on_host_backend()) expect_foreign(env, kSmallHt, kDamagedNumbers);
}
EP_TEST(memory_without_a_dispatch_is_not_followed) {
    if (ranks_share_a_node()) expect_foreign(env, kSmallLl, kNoRouting);
}

// The other ranks are through when the last one fails; the first hears that before its update has written the header.
EP_TEST(an_update_of_memory_beside_a_failure_tells_who_failed) {
    if (!ranks_share_a_node()) return;
    if (env->size == 1 || !ep_hold_block(1)) {
        ep_skip("only the CPU build can hold up a block, and only another rank can fail");
        return;
    }
    ep_release_block();
    const int failing = env->size - 1;
    Run run;
    Case test = kSmallHt;
    test.in_memory = true;
    run_open(&run, env, NULL, &test, 745);
    run_init(&run);
    ep_sync(env);
    if (env->rank == 0) (void)ep_hold_block(1);
    EP_CHECK_NCCL(run_update(&run));
    if (env->rank != 0) ep_sync(env);
    if (env->rank == failing) {
        EP_CHECK_CUDA(cudaMemset(ref_buffer_data(&run.memory), 0, run.memory.bytes));
        EP_CHECK_NCCL(run_combine(&run, NCCL_EP_FWD_PASS));
        ep_sync(env);
    }
    ep_barrier();
    if (env->rank == 0) {
        ep_release_block();
        ep_sync(env);
        forget_lines();
        CHECK_REFUSED(run_combine(&run, NCCL_EP_FWD_PASS), ncclRemoteError,
                      "failed before the handle's state was written");
    }
    run_end_handle(&run);
    (void)ncclEpGroupDestroy(run.own_group);  // it may tell of the failure
    run.own_group = NULL;
    run_close(&run);
}
