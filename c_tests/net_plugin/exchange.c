// NCCL over the network plugin, on GPUs of one host whose ranks believe to be on different hosts:
// `mpirun -np 2 net_exchange PLUGIN`. Messages and an all-gather must arrive whole, and NCCL's log
// must show that the plugin carried them, and nothing else.
#define _GNU_SOURCE  // mkstemp, realpath, setenv
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "harness/harness.h"
#include "net_plugin/log.h"

enum { kMiB = 1 << 20, kWord = sizeof(uint64_t), kGathered = kMiB + kWord, kAll = 255 };

static const size_t kSizes[] = {kWord, 4096, 64 * 1024, kMiB + kWord, 64 * kMiB};

// What this rank has to see in its log.
typedef struct {
    uint64_t sent, received;
} Carried;

// NCCL reads these when the first communicator is made. Those that the proof depends on are set
// whatever the caller has set.
static void set_environment(const EpEnv* env, const char* plugin, char* log) {
    char path[PATH_MAX];
    char host[32];
    EP_REQUIRE(realpath(plugin, path) != NULL);
    const int file = mkstemp(log);
    EP_REQUIRE(file >= 0);
    close(file);
    snprintf(host, sizeof(host), "net-exchange-%d", env->rank);
    const char* const settings[][2] = {
        {"NCCL_HOSTID", host},          {"NCCL_MNNVL_ENABLE", "0"},
        {"NCCL_NET_PLUGIN", path},      {"NCCL_NET", NET_PLUGIN_NAME},
        {"NCCL_DEBUG", "INFO"},         {"NCCL_DEBUG_SUBSYS", "INIT,NET"},
        {"NCCL_DEBUG_FILE", log},
    };
    for (size_t i = 0; i < sizeof(settings) / sizeof(settings[0]); ++i) {
        EP_REQUIRE(setenv(settings[i][0], settings[i][1], 1) == 0);
    }
}

// The bytes from one rank to another, or to all.
static void fill(char* data, size_t bytes, int from, int to) {
    for (size_t at = 0; at < bytes; at += kWord) {
        const uint64_t word = ep_mix((uint64_t)(256 * from + to), bytes, at);
        memcpy(data + at, &word, kWord);
    }
}

// A message of `bytes` bytes from every rank to every other one, in one group.
static void exchange(const EpEnv* env, size_t bytes, Carried* carried) {
    const size_t total = bytes * (size_t)env->size;
    char* host = malloc(total);
    char* got = malloc(total);
    EP_REQUIRE(host != NULL && got != NULL);
    for (int peer = 0; peer < env->size; ++peer) {
        fill(host + (size_t)peer * bytes, bytes, env->rank, peer);
    }
    char* out = ep_device_upload(host, total);
    char* in = ep_device_alloc(total);
    EP_CHECK_NCCL(ncclGroupStart());
    for (int peer = 0; peer < env->size; ++peer) {
        const size_t at = (size_t)peer * bytes;
        if (peer == env->rank) continue;
        EP_CHECK_NCCL(ncclSend(out + at, bytes, ncclInt8, peer, env->comm, env->stream));
        EP_CHECK_NCCL(ncclRecv(in + at, bytes, ncclInt8, peer, env->comm, env->stream));
        carried->sent += bytes;
        carried->received += bytes;
    }
    EP_CHECK_NCCL(ncclGroupEnd());
    ep_sync(env);
    ep_download(got, in, total);
    for (int peer = 0; peer < env->size; ++peer) {
        if (peer == env->rank) continue;
        const size_t at = (size_t)peer * bytes;
        fill(host + at, bytes, peer, env->rank);
        EP_CHECK_EQ_BYTES(got + at, host + at, bytes);
    }
    ep_device_free(out);
    ep_device_free(in);
    free(host);
    free(got);
}

static void all_gather(const EpEnv* env, Carried* carried) {
    const size_t total = (size_t)kGathered * (size_t)env->size;
    char* host = malloc(total);
    char* got = malloc(total);
    EP_REQUIRE(host != NULL && got != NULL);
    for (int rank = 0; rank < env->size; ++rank) {
        fill(host + (size_t)rank * kGathered, kGathered, rank, kAll);
    }
    char* out = ep_device_upload(host + (size_t)env->rank * kGathered, kGathered);
    char* in = ep_device_alloc(total);
    EP_CHECK_NCCL(ncclAllGather(out, in, kGathered, ncclInt8, env->comm, env->stream));
    ep_sync(env);
    ep_download(got, in, total);
    EP_CHECK_EQ_BYTES(got, host, total);
    // Whatever the algorithm, a rank's own part leaves it and all other parts reach it.
    carried->sent += kGathered;
    carried->received += total - kGathered;
    ep_device_free(out);
    ep_device_free(in);
    free(host);
    free(got);
}

static void print_log(const char* path) {
    char line[1024];
    FILE* file = fopen(path, "r");
    while (file != NULL && fgets(line, sizeof(line), file) != NULL) fputs(line, stderr);
    if (file != NULL) fclose(file);
}

static void check_log(const EpEnv* env, const char* path, const Carried* carried) {
    NetLog log;
    const uint64_t failed = ep_failed();
    EP_CHECK(net_log_read(path, &log));
    EP_CHECK(log.channels > 0);
    EP_CHECK_EQ_U64(log.other_channels, 0);
    EP_CHECK(log.sent_messages > 0 && log.sent_bytes >= carried->sent);
    EP_CHECK(log.received_messages > 0 && log.received_bytes >= carried->received);
    printf("rank %d: %llu channels over NET/%s, which sent %llu bytes, at least %llu expected, and "
           "received %llu, at least %llu expected\n",
           env->rank, (unsigned long long)log.channels, NET_PLUGIN_NAME,
           (unsigned long long)log.sent_bytes, (unsigned long long)carried->sent,
           (unsigned long long)log.received_bytes, (unsigned long long)carried->received);
    if (ep_failed() != failed) print_log(path);
    unlink(path);
}

int main(int argc, char** argv) {
    EpEnv env;
    Carried carried = {0, 0};
    char log[] = P_tmpdir "/ep-net-exchange-XXXXXX";
    ep_init_mpi(&env, &argc, &argv);
    EP_REQUIRE(argc == 2);  // the plugin
    if (env.size < 2) {
        ep_skip("needs two ranks");
        return ep_finish(&env);
    }
    set_environment(&env, argv[1], log);
    ep_init_device(&env);
    for (size_t i = 0; i < sizeof(kSizes) / sizeof(kSizes[0]); ++i) {
        exchange(&env, kSizes[i], &carried);
    }
    all_gather(&env, &carried);
    // The plugin logs what a connection carried when NCCL closes it.
    EP_CHECK_NCCL(ncclCommDestroy(env.comm));
    env.comm = NULL;
    check_log(&env, log, &carried);
    return ep_finish(&env);
}
