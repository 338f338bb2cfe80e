// The vocabulary of every kernel file, in layers: each header may use those above it only.
//
// Kernel files include this header and parts of themselves, nothing else: that is what allows the same
// files to be compiled for a CPU in tests.
#pragma once

#include "params.h"

#include "common/ptx.cuh"

#include "common/wait.cuh"

#include "common/ll.cuh"

#include "common/ll_gates.cuh"
#include "common/ll_rows.cuh"

#include "common/numeric.cuh"

#include "common/ll_sum.cuh"

#include "common/ht.cuh"

#include "common/ht_claims.cuh"
#include "common/ht_routing.cuh"

#include "common/carrier.cuh"

#include "common/ht_places.cuh"

#include "common/herald.cuh"
