// Counted checks.
//
// Every EP_CHECK* counts one pass or one failure, prints site, expression and values on failure,
// and yields true if it passed, so that `if (!EP_CHECK(...)) return;` works. Compare arrays with
// one EP_CHECK_EQ_BYTES instead of one check for each element.
#pragma once

#include <cuda_runtime.h>
#include <nccl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

__BEGIN_DECLS

#define EP_CHECK(condition) (EP_REACHED, ep_check(EP_HERE(#condition), (condition)))
#define EP_CHECK_EQ_U64(actual, expected) \
    (EP_REACHED, ep_check_eq_u64(EP_HERE(#actual " == " #expected), (uint64_t)(actual), (uint64_t)(expected)))
#define EP_CHECK_EQ_I64(actual, expected) \
    (EP_REACHED, ep_check_eq_i64(EP_HERE(#actual " == " #expected), (int64_t)(actual), (int64_t)(expected)))
#define EP_CHECK_EQ_BYTES(actual, expected, bytes) \
    (EP_REACHED, ep_check_eq_bytes(EP_HERE(#actual " == " #expected), (actual), (expected), (bytes)))
#define EP_CHECK_STR_CONTAINS(text, part) \
    (EP_REACHED, ep_check_str_contains(EP_HERE(#text " contains " #part), (text), (part)))
#define EP_CHECK_RESULT(call, expected) (EP_REACHED, ep_check_result(EP_HERE(#call), (call), (expected)))
#define EP_CHECK_NCCL(call) EP_CHECK_RESULT(call, ncclSuccess)
#define EP_CHECK_CUDA(call) (EP_REACHED, ep_check_cuda(EP_HERE(#call), (call)))

// Set-up that must not fail. A failure is printed and ends all processes; a success is not counted.
#define EP_REQUIRE(condition) (EP_REACHED, ep_require(EP_HERE(#condition), (condition)))
#define EP_REQUIRE_NCCL(call) (EP_REACHED, ep_require_nccl(EP_HERE(#call), (call)))
#define EP_REQUIRE_CUDA(call) (EP_REACHED, ep_require_cuda(EP_HERE(#call), (call)))

// The site of a check, for its message. EP_REACHED comes first: C leaves the order of arguments
// open, and the watchdog must know the site before a call in the condition can hang.
typedef struct {
    const char* file;
    int line;
    const char* expression;
} EpSite;
#define EP_HERE(expression) ep_site(__FILE__, __LINE__, expression)
#define EP_REACHED ep_watchdog_at_site(__FILE__, __LINE__)
EpSite ep_site(const char* file, int line, const char* expression);

bool ep_check(EpSite site, bool passed);
bool ep_check_eq_u64(EpSite site, uint64_t actual, uint64_t expected);
bool ep_check_eq_i64(EpSite site, int64_t actual, int64_t expected);
bool ep_check_eq_bytes(EpSite site, const void* actual, const void* expected, size_t bytes);
bool ep_check_str_contains(EpSite site, const char* text, const char* part);
bool ep_check_result(EpSite site, ncclResult_t actual, ncclResult_t expected);
bool ep_check_cuda(EpSite site, cudaError_t actual);
void ep_require(EpSite site, bool passed);
void ep_require_nccl(EpSite site, ncclResult_t actual);
void ep_require_cuda(EpSite site, cudaError_t actual);

// Counts of this process so far; ep_count adds those of a child process.
uint64_t ep_passed(void);
uint64_t ep_failed(void);
void ep_count(uint64_t passed, uint64_t failed);

// Counts a test that this backend or device cannot run. The number and the last reason stand above the closing line; a
// program that ran nothing else ends with status 77. Call it on every rank; only rank 0 prints.
enum { kEpSkippedStatus = 77 };
void ep_skip(const char* reason);
unsigned ep_skipped(void);
const char* ep_skip_reason(void);

// The rank in messages of a process that does not use MPI.
void ep_checks_are_of_rank(int rank);

// The library's text for the last refusal in this thread; "" if there is none or the library has none.
const char* ep_last_error(void);

// Where the watchdog says that the process hung (watchdog.c).
void ep_watchdog_at_site(const char* file, int line);

__END_DECLS
