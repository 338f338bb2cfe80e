// Counted checks. A failure prints one line with rank, file and line, expression and values; beyond a limit failures
// are only counted, so that a broken run stays readable. EP_REQUIRE ends all processes.
#define _GNU_SOURCE  // for RTLD_DEFAULT
#include "check.h"

#include <dlfcn.h>
#include <mpi.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { kPrintedFailures = 20, kTextBytes = 512 };

static uint64_t g_passed;
static uint64_t g_failed;
static unsigned g_skipped;
static const char* g_skip_reason = "";
static int g_rank_without_mpi;

uint64_t ep_passed(void) { return g_passed; }
uint64_t ep_failed(void) { return g_failed; }

void ep_count(uint64_t passed, uint64_t failed) {
    g_passed += passed;
    g_failed += failed;
}

void ep_skip(const char* reason) {
    ++g_skipped;
    g_skip_reason = reason;
}

unsigned ep_skipped(void) { return g_skipped; }
const char* ep_skip_reason(void) { return g_skip_reason; }

void ep_checks_are_of_rank(int rank) { g_rank_without_mpi = rank; }

EpSite ep_site(const char* file, int line, const char* expression) { return (EpSite){file, line, expression}; }

static bool has_mpi(void) {
    int initialised = 0;
    int finalised = 0;
    MPI_Initialized(&initialised);
    MPI_Finalized(&finalised);
    return initialised && !finalised;
}

static int world_rank(void) {
    int rank = g_rank_without_mpi;
    if (has_mpi()) MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    return rank;
}

// One write for one line, so that the lines of several processes do not mix.
static void print_failure(EpSite site, const char* values) {
    char line[2 * kTextBytes];
    snprintf(line, sizeof(line), "[rank %d] %s:%d: %.300s failed%s%s\n", world_rank(), site.file, site.line,
             site.expression, values[0] != '\0' ? ": " : "", values);
    fflush(stdout);
    fputs(line, stderr);
}

static void end_all(void) {
    fflush(NULL);
    if (has_mpi()) MPI_Abort(MPI_COMM_WORLD, 1);
    _exit(1);
}

// Where only one failure matters, as with a planted bug.
static bool ends_at_failure(void) {
    const char* chosen = getenv("EP_TEST_FIRST_FAILURE");
    return chosen != NULL && strcmp(chosen, "1") == 0;
}

#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
static bool
count(EpSite site, bool passed, const char* format, ...) {
    if (passed) {
        ++g_passed;
        return true;
    }
    ++g_failed;
    if (g_failed <= kPrintedFailures) {
        char values[kTextBytes];
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(values, sizeof(values), format, arguments);
        va_end(arguments);
        print_failure(site, values);
    }
    if (ends_at_failure()) end_all();
    if (g_failed == kPrintedFailures) {
        fprintf(stderr, "[rank %d] further failures are counted, not printed\n", world_rank());
    }
    return false;
}

bool ep_check(EpSite site, bool passed) { return count(site, passed, "%s", ""); }

bool ep_check_eq_u64(EpSite site, uint64_t actual, uint64_t expected) {
    return count(site, actual == expected, "got %llu, expected %llu", (unsigned long long)actual,
                 (unsigned long long)expected);
}

bool ep_check_eq_i64(EpSite site, int64_t actual, int64_t expected) {
    return count(site, actual == expected, "got %lld, expected %lld", (long long)actual, (long long)expected);
}

// Written so that a NaN on either side fails, and equal infinities pass.
bool ep_check_eq_bytes(EpSite site, const void* actual, const void* expected, size_t bytes) {
    const unsigned char* left = (const unsigned char*)actual;
    const unsigned char* right = (const unsigned char*)expected;
    if (bytes == 0 || memcmp(left, right, bytes) == 0) return count(site, true, "%s", "");
    size_t first = 0;
    while (left[first] == right[first]) ++first;
    size_t different = 0;
    for (size_t i = first; i < bytes; ++i) different += left[i] != right[i];
    return count(site, false, "%zu of %zu bytes differ, first at %zu: got 0x%02x, expected 0x%02x", different, bytes,
                 first, left[first], right[first]);
}

bool ep_check_str_contains(EpSite site, const char* text, const char* part) {
    return count(site, text != NULL && strstr(text, part) != NULL, "got \"%s\", expected \"%s\"",
                 text != NULL ? text : "(null)", part);
}

bool ep_check_result(EpSite site, ncclResult_t actual, ncclResult_t expected) {
    return count(site, actual == expected, "got %d (%s), expected %d (%s); %s", (int)actual, ncclGetErrorString(actual),
                 (int)expected, ncclGetErrorString(expected), ep_last_error());
}

bool ep_check_cuda(EpSite site, cudaError_t actual) {
    return count(site, actual == cudaSuccess, "got %d (%s)", (int)actual, cudaGetErrorString(actual));
}

static void fail_for_all(EpSite site, const char* values) {
    print_failure(site, values);
    end_all();
}

void ep_require(EpSite site, bool passed) {
    if (!passed) fail_for_all(site, "");
}

void ep_require_nccl(EpSite site, ncclResult_t actual) {
    if (actual == ncclSuccess) return;
    char values[kTextBytes];
    snprintf(values, sizeof(values), "%d (%s); %s", (int)actual, ncclGetErrorString(actual), ep_last_error());
    fail_for_all(site, values);
}

void ep_require_cuda(EpSite site, cudaError_t actual) {
    if (actual == cudaSuccess) return;
    char values[kTextBytes];
    snprintf(values, sizeof(values), "%d (%s)", (int)actual, cudaGetErrorString(actual));
    fail_for_all(site, values);
}

const char* ep_last_error(void) {
    typedef const char* (*LastErrorFn)(void);
    LastErrorFn last_error = NULL;
    // ISO C has no conversion from an object pointer to a function pointer; POSIX guarantees this one.
    void* symbol = dlsym(RTLD_DEFAULT, "ncclEpGetLastError");
    memcpy(&last_error, &symbol, sizeof(last_error));
    const char* text = last_error != NULL ? last_error() : NULL;
    return text != NULL ? text : "";
}
