// A driver that does nothing for a while, and what the calling thread does with memory meanwhile.
#ifndef C_TESTS_SIMT_HOST_PATH_RESTING_DRIVER_H_
#define C_TESTS_SIMT_HOST_PATH_RESTING_DRIVER_H_

#include <stdbool.h>
#include <stdint.h>

// From now on kernels are not launched, events neither recorded nor waited for; or they are again.
void driver_rest(bool rest);

// How often this thread has allocated or freed memory.
uint64_t memory_calls(void);

#endif  // C_TESTS_SIMT_HOST_PATH_RESTING_DRIVER_H_
