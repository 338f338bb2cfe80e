// What every program in c_tests shares, whichever interface it calls: MPI, device and communicator set-up,
// counted checks, a watchdog, deterministic data, 16-bit float conversions, device buffers; and the headers of C that
// nearly all of them need.
//
// Usable from C11 and C++17. It calls nothing but MPI, the CUDA runtime and NCCL.
#pragma once

#include <cuda_runtime.h>
#include <mpi.h>
#include <nccl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/cdefs.h>

#include "check.h"

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

__BEGIN_DECLS

// ---- Life of a program (harness.c)

typedef struct {
    int rank;             // this process in MPI_COMM_WORLD
    int size;             // number of processes; 1 without mpirun
    int local_rank;       // among the processes of this host
    int device;           // the CUDA device in use: local_rank modulo the number of devices
    ncclComm_t comm;      // over all processes; a test that destroys it sets it to NULL
    cudaStream_t stream;  // a blocking stream; a test that destroys it sets it to NULL
} EpEnv;

// Both steps of the set-up. A failure of either ends all processes.
void ep_init(EpEnv* env, int* argc, char*** argv);

// The two steps apart, for a program that acts between them, for example sets NCCL's environment.
void ep_init_mpi(EpEnv* env, int* argc, char*** argv);
void ep_init_device(EpEnv* env);
// Another communicator of all processes. Collective.
ncclComm_t ep_new_comm(const EpEnv* env);

// Adds up the checks of all processes; process 0 prints "N passed, N failed" as the last line.
// Returns the exit status, the same in every process: 0 if all checks passed and at least one ran.
int ep_finish(EpEnv* env);

// Releases what ep_init made, without the closing line, for programs with an output format of their own.
void ep_release(EpEnv* env);

// A test case: EP_TEST(name) stands in place of the head of its function, which gets `env`. A
// program runs its cases file by file, in the order in which they stand there.
#define EP_TEST(name) EP_DEFINE_CASE(name, false, false)
// Skipped, and reported as skipped, where there is no high throughput.
#define EP_TEST_HT(name) EP_DEFINE_CASE(name, true, false)
// Runs after all others, as it leaves the process in another state.
#define EP_TEST_LAST(name) EP_DEFINE_CASE(name, false, true)

typedef struct EpCase {
    const char* name;
    void (*run)(EpEnv* env);
    bool needs_ht, is_last;
    const char* file;
    int line;
    struct EpCase* next;
} EpCase;
void ep_add_case(EpCase* added);
#define EP_DEFINE_CASE(name, needs_ht, is_last)                                          \
    static void name(EpEnv* env);                                                        \
    __attribute__((constructor)) static void name##_is_a_case(void) {                    \
        static EpCase self = {#name, name, needs_ht, is_last, __FILE__, __LINE__, NULL}; \
        ep_add_case(&self);                                                              \
    }                                                                                    \
    static void name(__attribute__((unused)) EpEnv* env)

// A case with `it`, which `open` makes from env before the case and `close` ends after it. `test` is one of the above.
#define EP_TEST_WITH(test, name, Type, it, open, close)     \
    static void name##_with(EpEnv* env, Type* it);          \
    test(name) {                                            \
        Type it = open(env);                                \
        name##_with(env, &it);                              \
        close(&it);                                         \
    }                                                       \
    static void name##_with(__attribute__((unused)) EpEnv* env, Type* it)

// A complete main(): runs all cases or, given an argument, those whose name contains it.
int ep_main(int argc, char** argv);

// By a clock that only goes forward.
double ep_seconds(void);

// True when the CPU stand-ins of the CUDA runtime and of NCCL are loaded instead of the real
// libraries, with or without the kernels.
bool ep_on_hostsim(void);

// True with fake_nccl/: unlike NCCL it has one node, and a waiting all-gather blocks those of the
// process's other communicators.
bool ep_on_fake_nccl(void);

// True with the CPU backend, false where operations are kernels, on a GPU or on the CPU. Only for
// differences that the documentation states.
bool ep_on_host_backend(void);

// True in the CPU build of the kernels. What only its driver can do is below; elsewhere that does nothing.
bool ep_on_cpu_build(void);

// Holds this block of the next kernel until it is released; false elsewhere.
bool ep_hold_block(unsigned block);
void ep_release_block(void);

// What the driver does to this process from now on, until it is set to false.
typedef enum { kEpNoImport, kEpNoMemory, kEpStopAtLaunch } EpMishap;
void ep_set_mishap(EpMishap mishap, bool happens);

// Whether this backend has high throughput. The first call is collective and its answer is kept. A
// refusal for another reason than a missing mode is a failed check. Each interface has its own (tensor.c).
bool ep_has_high_throughput(const EpEnv* env);

// Skips a case for want of high throughput.
void ep_skip_high_throughput(void);

// Waits for the stream of env; a failure counts as a failed check.
void ep_sync(const EpEnv* env);
void ep_barrier(void);

// Before the declaration of a pointer to memory of malloc or of ref_host_new: freed at the end of its block.
#define EP_SCOPED __attribute__((cleanup(ep_free_scoped)))
static inline void ep_free_scoped(void* pointer) {
    void* memory;
    memcpy(&memory, pointer, sizeof(memory));
    free(memory);
}

// Streams without order to any other, the default stream included.
void ep_open_streams(cudaStream_t* streams, unsigned count);
void ep_close_streams(const cudaStream_t* streams, unsigned count);

// Sets a variable of the environment, or unsets it with NULL, until the end of the block.
#define EP_WITH_VARIABLE(name, value) EP_WITH_VARIABLE_AT(name, value, __LINE__)
#define EP_WITH_VARIABLE_AT(name, value, line) EP_WITH_VARIABLE_IN(name, value, line)
#define EP_WITH_VARIABLE_IN(name, value, line) \
    __attribute__((cleanup(ep_restore_variable), unused)) EpVariable variable_##line = ep_set_variable(name, value)
typedef struct {
    const char* name;
    char* before;  // NULL: it was not set
} EpVariable;
EpVariable ep_set_variable(const char* name, const char* value);
void ep_restore_variable(EpVariable* variable);

// Runs `work` on each of `count` arguments of `bytes`, all at once in threads, and waits for their ends.
void ep_in_threads(void* (*work)(void* argument), void* arguments, size_t bytes, size_t count);

// One option of a C program with a value: a number or a text.
typedef struct {
    const char* name;
    unsigned* number;
    const char** text;
} EpOption;

// Reads "--name value" pairs; a single other word goes to *word, where that is not NULL. Returns
// whether it has understood all.
bool ep_read_options(int argc, char** argv, const EpOption* options, size_t count, const char** word);

// ---- Leaks (leaks.c)

// In a build with the address sanitizer: prints leaked memory and returns true if there is any.
// False in every other build. Call it before ep_finish or ep_release.
bool ep_has_leaks(void);

// MPI_Init, of which nothing counts as a leak.
void ep_init_unwatched(int* argc, char*** argv);

// ---- Watchdog (watchdog.c)

// Ends the process with status 124 and prints where it hung, unless it is done `seconds` from now.
// ep_init arms it with EP_TEST_DEADLINE seconds, 120 by default; 0 switches it off.
void ep_watchdog_arm(const EpEnv* env, unsigned seconds);
unsigned ep_watchdog_default(unsigned otherwise);
void ep_watchdog_at_case(const char* name);
void ep_watchdog_case_done(void);

// ---- Deterministic data (data.c)

// splitmix64: a sequence from a seed held by the caller.
uint64_t ep_random(uint64_t* state);
uint64_t ep_random_below(uint64_t* state, uint64_t bound);  // 0 <= result < bound, bound > 0
double ep_random_unit(uint64_t* state);                     // 0 <= result < 1

// A hash of three numbers, by which any rank computes what another has sent.
uint64_t ep_mix(uint64_t a, uint64_t b, uint64_t c);

// Conversions with round-to-nearest-even; overflow gives an infinity, a NaN stays a NaN.
uint16_t ep_bf16_from_f32(float value);
float ep_f32_from_bf16(uint16_t bits);
uint16_t ep_f16_from_f32(float value);
float ep_f32_from_f16(uint16_t bits);

// One element of a float16, bfloat16 or float32 array.
void ep_store(ncclDataType_t datatype, void* base, size_t index, float value);
float ep_load(ncclDataType_t datatype, const void* base, size_t index);
size_t ep_datatype_size(ncclDataType_t datatype);

// The same for the first `count` elements, much faster.
void ep_store_all(ncclDataType_t datatype, void* base, size_t count, const float* values);
void ep_load_all(ncclDataType_t datatype, const void* base, size_t count, float* values);

// ---- Device buffers (memory.c)

void* ep_device_alloc(size_t bytes);
void* ep_device_upload(const void* host, size_t bytes);  // allocates and fills
void ep_device_free(void* device);
size_t ep_free_bytes(void);  // of the device
// Of this process.
int ep_open_descriptors(void);
void ep_download(void* host, const void* device, size_t bytes);
void ep_upload(void* device, const void* host, size_t bytes);

// ---- Gates (memory.c)

// Blocks a stream until it is opened, which must happen before it is freed.
typedef struct {
    bool is_open;
} EpGate;
void ep_gate_close(EpGate* gate, cudaStream_t stream);
void ep_gate_open(EpGate* gate);

__END_DECLS
