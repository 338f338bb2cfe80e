// A driver that does nothing for a while, and what the calling thread does with memory meanwhile.
#pragma once

#include <stdint.h>

typedef struct {
    uint64_t launches, records, waits;
    uint64_t broken;                // captures ended by a question
    const void *recorded, *waited;  // the last events
} DriverCalls;

// From now on kernels are not launched, events neither recorded nor waited for. All streams are
// being captured into the graph `capture`, unless that is 0.
void driver_rest(uint64_t capture);

// Now they are again. What was asked for meanwhile.
DriverCalls driver_wake(void);

// How often this thread has allocated or freed memory.
uint64_t memory_calls(void);
