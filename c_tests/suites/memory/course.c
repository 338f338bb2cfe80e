// Random courses: objects of both kinds come and go, some calls are refused by one rank, dispatches run in between.
#include "reference/run.h"
#include "suites/memory/memory.h"

enum { kSteps = 60, kMost = 9, kLeast = 1000, kMore = 1 << 16, kGroups = 2 };

typedef struct {
    uint8_t* memory;  // NULL: none
    uint8_t* given;   // the caller's allocation that it is in; NULL for the library's
    uint64_t seed;
} Piece;

typedef struct {
    const EpEnv* env;
    ncclEpGroup_t group;
    Piece pieces[kMost];
    uint64_t dice;  // the same on all ranks
} Course;

static void end_piece(Course* course, Piece* piece) {
    if (piece->given == NULL) {
        EP_CHECK_NCCL(ncclEpMemFree(course->group, piece->memory));
    } else {
        EP_CHECK_NCCL(ncclEpMemDeregister(course->group, piece->memory));
        ep_device_free(piece->given);
    }
    EP_CHECK_EQ_I64(object_at(course->group, piece->memory), -1);
    piece->memory = NULL;
}

// The lowest free number, which is the place of the piece here, too.
static void make_piece(Course* course, unsigned place) {
    Piece* piece = &course->pieces[place];
    const int rank = course->env->rank;
    piece->seed = ep_random(&course->dice);
    const size_t bytes = kLeast + ep_mix(piece->seed, (uint64_t)rank, 1) % kMore;
    piece->given = NULL;
    if (piece->seed % 2 == 0) {
        piece->memory = new_memory(course->group, bytes);
    } else {
        const size_t offset = 16 * (ep_mix(piece->seed, (uint64_t)rank, 2) % 100);
        piece->given = ep_device_alloc(bytes + offset);
        piece->memory = piece->given + offset;
        EP_CHECK_NCCL(ncclEpMemRegister(course->group, piece->memory, bytes, NULL));
    }
    fill(course->env, piece->memory, bytes, piece->seed);
    const ncclEpMemInfo_t info = info_of(course->group, piece->memory);
    EP_CHECK_EQ_U64(info.object, place);
    EP_CHECK_EQ_U64(info.bytes, bytes);
    EP_CHECK(piece->given != NULL || (uintptr_t)piece->memory % 256 == 0);
    EP_CHECK_EQ_I64(object_at(course->group, piece->memory - 1), -1);
    EP_CHECK_EQ_I64(object_at(course->group, piece->memory + bytes), -1);
}

// A random rank asks for nothing, or ends something that is no object; all get an error, and go on.
static void refuse(Course* course, const Piece* known) {
    const uint64_t draw = ep_random(&course->dice);
    const bool is_mine = (int)(draw % (unsigned)course->env->size) == course->env->rank;
    ncclResult_t result;
    if (known == NULL || draw % 3 == 0) {
        void* none = NULL;
        result = ncclEpMemAlloc(course->group, &none, is_mine ? 0 : kLeast);
        EP_CHECK(none == NULL);
    } else if (known->given == NULL) {
        result = ncclEpMemFree(course->group, is_mine ? NULL : known->memory);
    } else {
        result = ncclEpMemDeregister(course->group, is_mine ? NULL : known->memory);
    }
    EP_CHECK_RESULT(result, is_mine ? ncclInvalidArgument : ncclRemoteError);
}

static void step(Course* course) {
    const uint64_t draw = ep_random_below(&course->dice, 10);
    const unsigned place = (unsigned)ep_random_below(&course->dice, kMost);
    Piece* piece = &course->pieces[place];
    if (draw < 6) {
        if (piece->memory != NULL) {
            end_piece(course, piece);
            return;
        }
        unsigned lowest = 0;
        while (course->pieces[lowest].memory != NULL) ++lowest;
        make_piece(course, lowest);
    } else if (draw < 8) {
        refuse(course, piece->memory == NULL ? NULL : piece);
    } else if (piece->memory != NULL) {
        check_peers(course->env, course->group, piece->memory, piece->seed);
    }
}

EP_TEST(random_courses) {
    const RefShape shape = {.datatype = ncclBfloat16, .hidden = 64, .top_k = 2, .max_tokens = 5,
                            .num_experts = 2 * (unsigned)env->size};
    for (unsigned i = 0; i < kGroups; ++i) {
        Course course = {.env = env, .dice = 77 + i};
        RefRun run = ref_run_open_with(env, NULL, &shape, kRefDistinct, true, ref_ll(i));
        course.group = run.group;
        for (unsigned s = 0; s < kSteps; ++s) {
            if (s % 8 == 0) ref_dispatch(&run);
            step(&course);
            if (s % 8 == 0) ref_combine(&run);
        }
        // Half of what is left ends with the group.
        for (unsigned place = 0; place < kMost; place += 2) {
            if (course.pieces[place].memory != NULL) end_piece(&course, &course.pieces[place]);
        }
        ref_run_close(&run);
        for (unsigned place = 1; place < kMost; place += 2) {
            const Piece* left = &course.pieces[place];
            if (left->memory != NULL && left->given != NULL) ep_device_free(left->given);
        }
    }
}
