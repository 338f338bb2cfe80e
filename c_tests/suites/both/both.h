// Cases that test_ll and test_ht share.
#pragma once

#include "reference/run.h"

// The shape of a case. The last two are of high throughput; tables may leave them out.
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
typedef struct {
    unsigned local_experts, max_tokens, top_k;
    ncclDataType_t datatype;
    unsigned hidden;
    RefStyle style;
    bool uneven;
    HtRows rows;
    HtCounter counter;
} Shape;
// A run in a group of its own.
RefRun open_shape(const EpEnv* env, const Shape* shape, bool ht, uint64_t seed);
// One of each shape.
void play_shapes(const EpEnv* env, const Shape* shapes, size_t num_shapes, bool ht, void (*play)(RefRun* run));
// One of each top-k up to the shape's, in one group.
void play_every_top_k(const EpEnv* env, RefShape shape, RefOpening opening, void (*play)(RefRun* run));
#define SHAPES_TEST(name, ht, play, ...)                     \
    EP_TEST(name) {                                          \
        static const Shape kShapes[] = {__VA_ARGS__};        \
        play_shapes(env, kShapes, COUNT(kShapes), ht, play); \
    }

void unordered_streams(EpEnv* env, bool ht);

// Invariant sums: the bits of a combined token do not depend on the rank that is its home, nor on that rank's node.
void bits_from_any_home(EpEnv* env, bool ht);

// Dispatches, or combines, of a run with a group of its own add how long they wait for each rank, until that ends.
void waits_are_timed(RefRun* run, bool combine);

// What a selector was told last, and what it chooses.
typedef struct {
    unsigned asked;  // how often
    ncclEpQuery_t query;
    ncclEpChoice_t choice;
    bool chooses;
    ncclEpGroup_t group;
} Selector;
int select_choice(void* user, const ncclEpQuery_t* query, ncclEpChoice_t* choice);
void check_query(const Selector* selector, const RefRun* run, unsigned operation);
