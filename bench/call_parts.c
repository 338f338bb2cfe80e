// Where the time inside ncclEpDispatch and ncclEpCombine goes, of any program that calls them
// (docs/development/host-time.md). At the program's end each process prints medians.
//
//     gcc -O2 -shared -fPIC -I$CUDA_HOME/include bench/call_parts.c -o /tmp/call_parts.so
//         -Wl,--no-as-needed -lcuda -ldl
//     mpirun -np 4 -x LD_PRELOAD=/tmp/call_parts.so ep_bench --algorithm ll --sweep 128
//
// Stands before the library and the driver. Calls without an event (refused ones) do not count.
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { kMostCalls = 60000, kFewestCalls = 20, kOps = 2, kParts = 5 };

typedef struct {
    int op;
    double gap;            // since the call before
    double parts[kParts];  // as kPartNames
} Call;

static const char* const kOpNames[kOps] = {"ncclEpDispatch", "ncclEpCombine"};
static const char* const kPartNames[kParts] = {"before", "launch", "between", "event", "after"};

static Call calls[kMostCalls];
static int num_calls;
static double launch_begin, launch_end, event_begin, event_end, last_end;

static double now_us(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return 1e6 * (double)time.tv_sec + 1e-3 * (double)time.tv_nsec;
}

// What would be called if this library did not define `name`.
#define NEXT(function, name) \
    if ((function) == NULL) memcpy(&(function), &(void*){dlsym(RTLD_NEXT, name)}, sizeof(void*))

// ---- The driver ---------------------------------------------------------------------------------

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction kernel, void** params,
                          void** extra) {
    static CUresult (*next)(const CUlaunchConfig*, CUfunction, void**, void**);
    NEXT(next, "cuLaunchKernelEx");
    launch_begin = now_us();
    const CUresult result = next(config, kernel, params, extra);
    launch_end = now_us();
    return result;
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    static CUresult (*next)(CUevent, CUstream);
    NEXT(next, "cuEventRecord");
    event_begin = now_us();
    const CUresult result = next(event, stream);
    event_end = now_us();
    return result;
}

// ---- The library --------------------------------------------------------------------------------

typedef int (*Operation)(void*, void*, unsigned, void*, unsigned, void*, unsigned, unsigned, void*,
                         void*);

static void keep(int op, double begin, double end) {
    if (num_calls == kMostCalls || launch_begin == 0 || event_begin == 0) return;
    calls[num_calls++] =
        (Call){op,
               begin - last_end,
               {launch_begin - begin, launch_end - launch_begin, event_begin - launch_end,
                event_end - event_begin, end - event_end}};
}

// The parameters are those of ncclEpDispatch and ncclEpCombine, which have the same types.
#define OPERATION(name, op)                                                                      \
    int name(void* handle, void* in, unsigned num_in, void* out, unsigned num_out, void* local,  \
             unsigned num_local, unsigned send_only, void* config, void* stream) {               \
        static Operation next;                                                                   \
        NEXT(next, #name);                                                                       \
        launch_begin = event_begin = 0;                                                          \
        const double begin = now_us();                                                           \
        const int result =                                                                       \
            next(handle, in, num_in, out, num_out, local, num_local, send_only, config, stream); \
        const double end = now_us();                                                             \
        keep(op, begin, end);                                                                    \
        last_end = end;                                                                          \
        return result;                                                                           \
    }

OPERATION(ncclEpDispatch, 0)
OPERATION(ncclEpCombine, 1)

// ---- The end ------------------------------------------------------------------------------------

static int ascending(const void* a, const void* b) {
    const double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

// Calls of `op` that began `least` to `most` microseconds after the call before.
static void report(const char* rank, int op, double least, double most) {
    static double samples[kMostCalls];
    char line[256] = "";
    int count = 0;
    for (int part = 0; part < kParts; ++part) {
        count = 0;
        for (int i = 0; i < num_calls; ++i) {
            if (calls[i].op != op || calls[i].gap < least || calls[i].gap >= most) continue;
            samples[count++] = calls[i].parts[part];
        }
        if (count < kFewestCalls) return;
        qsort(samples, (size_t)count, sizeof(samples[0]), ascending);
        const size_t used = strlen(line);
        snprintf(line + used, sizeof(line) - used, " %s %.2f", kPartNames[part],
                 samples[count / 2]);
    }
    printf("rank %s, %s, %g to %g us after a call, %d times:%s\n", rank, kOpNames[op], least, most,
           count, line);
}

__attribute__((destructor)) static void report_all(void) {
    static const double kGaps[] = {0, 3, 15, 60, 300, 1e6};
    const char* rank = getenv("OMPI_COMM_WORLD_RANK");
    for (int op = 0; op < kOps; ++op) {
        for (size_t i = 0; i + 1 < sizeof(kGaps) / sizeof(kGaps[0]); ++i) {
            report(rank == NULL ? "-" : rank, op, kGaps[i], kGaps[i + 1]);
        }
    }
}
