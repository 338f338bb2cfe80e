// A driver that does nothing for a while, and what the calling thread does with memory meanwhile.
#ifndef C_TESTS_SIMT_HOST_PATH_RESTING_DRIVER_H_
#define C_TESTS_SIMT_HOST_PATH_RESTING_DRIVER_H_

#include <stdint.h>

typedef struct {
    uint64_t launches, records, waits;
} DriverCalls;

// From now on kernels are not launched, events neither recorded nor waited for.
void driver_rest(void);

// Now they are again. What was asked for meanwhile.
DriverCalls driver_wake(void);

// How often this thread has allocated or freed memory.
uint64_t memory_calls(void);

#endif  // C_TESTS_SIMT_HOST_PATH_RESTING_DRIVER_H_
