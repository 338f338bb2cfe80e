// Buffers of the tests in memory that peers map: with EP_TEST_MEMORY=mixed some lie in objects of the group, others on
// each rank and at other offsets; with EP_TEST_MEMORY=mapped all do for which there is room. Otherwise none does.
#pragma once

#include "harness/harness.h"

__BEGIN_DECLS

// Whether such buffers are wanted at all.
bool ref_mapped_is_wanted(void);

// Makes objects of the group; buffers that are made from now on may lie there. Collective. ref_group_new does it for
// groups in high throughput.
void ref_mapped_open(const EpEnv* env, ncclEpGroup_t group, uint64_t seed);
// New buffers no longer lie there. Those that do are dead when the group ends.
void ref_mapped_close(void);

__END_DECLS
