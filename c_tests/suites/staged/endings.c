// How staged operations end: in which order, and when their handle is destroyed first.
#include "suites/staged/staged.h"

// Destroying a handle abandons its pending operation: its slot is free again, its peers continue,
// and operations of other handles are right.
EP_TEST(handle_destroyed_while_pending) {
    enum { kRounds = 25 };
    Setup setup = set_up(env);
    RefRun* runs = setup.runs;
    for (unsigned i = 0; i < kRounds; ++i) {
        RefRun given_up = open_run(env, runs[0].group);
        send_dispatch(&given_up);
        if (i % 3 == 1) {
            complete_dispatch(&given_up, env->stream);
            send_combine(&given_up);
        }
        if (i % 4 == 2) send_dispatch(&runs[0]);
        EP_CHECK_NCCL(ep_handle_destroy(&given_up.handle));
        ep_sync(env);
        ref_run_close(&given_up);
        if (i % 4 == 2) complete_dispatch(&runs[0], env->stream);
        if (i % 5 == 0) ref_pair(&runs[1]);
    }
    for (unsigned pair = 0; pair < 10; ++pair) ref_pair(&runs[2]);
    send_dispatch(&runs[3]);  // tear_down abandons this one and destroys the group at once
    tear_down(&setup);
}

// One rank abandons what the others complete. They receive everything, as that rank had sent its part.
STAGED_TEST(handle_destroyed_on_one_rank) {
    enum { kRounds = 12 };
    for (unsigned i = 0; i < kRounds; ++i) {
        const bool combine = i % 3 == 2;
        RefRun run = open_run(env, setup->runs[0].group);
        if (combine) ref_dispatch(&run);
        combine ? send_combine(&run) : send_dispatch(&run);
        if (env->rank == (int)(i % (unsigned)env->size)) {
            EP_CHECK_NCCL(ep_handle_destroy(&run.handle));
            ep_sync(env);
        } else {
            combine ? complete_combine(&run, setup->other) : complete_dispatch(&run, setup->other);
        }
        ref_run_close(&run);
        for (unsigned r = 0; r < i % 4; ++r) ref_dispatch(&setup->runs[r]);
    }
}

// Each rank may complete or abandon operations in its own order.
STAGED_TEST(ended_in_another_order) {
    enum { kRounds = 8 };
    RefRun* first = &setup->runs[0];
    RefRun* second = &setup->runs[1];
    for (unsigned i = 0; i < kRounds; ++i) {
        const bool swaps = env->rank == (int)(i % (unsigned)env->size);
        send_dispatch(first);
        send_dispatch(second);
        complete_dispatch(swaps ? second : first, env->stream);
        complete_dispatch(swaps ? first : second, setup->other);
        REF_SCOPED RefRun given_up = open_run(env, setup->runs[0].group);
        send_dispatch(&given_up);
        if (!swaps) send_dispatch(first);
        EP_CHECK_NCCL(ep_handle_destroy(&given_up.handle));
        if (swaps) send_dispatch(first);
        complete_dispatch(first, env->stream);
    }
}

// One operation may stay in flight while others start and end.
STAGED_TEST(one_stays_in_flight) {
    RefRun* runs = setup->runs;
    for (unsigned i = 0; i < 4; ++i) {
        send_dispatch(&runs[0]);
        for (unsigned r = 1; r < kMaxRuns; ++r) {
            send_dispatch(&runs[r]);
            complete_dispatch(&runs[r], i % 2 == 0 ? env->stream : setup->other);
        }
        complete_dispatch(&runs[0], env->stream);
    }
}
