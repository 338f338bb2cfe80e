#include "forked/survivors.h"

#include "harness/nodes.h"

RefShape shape_for(const EpEnv* env) { return (RefShape){2 * (unsigned)env->size, 12, 3, ncclBfloat16, 64}; }

RefRun open_work(const EpEnv* env, uint64_t seed) {
    const RefShape shape = shape_for(env);
    RefRun run = ref_run_open_with(env, NULL, &shape, kRefDistinct, true, ref_ll(seed));
    ref_pair(&run);
    return run;
}

int survivors(const DeathRank* self) { return self->env.size - 1; }

bool in_time(const DeathRank* self, double since) {
    return ep_seconds() - since <= 0.001 * (self->timeout_ms + self->slack_ms);
}

void check_in_time(const DeathRank* self, double since) {
    const double late_ms = 1000 * (ep_seconds() - since) - self->timeout_ms - self->slack_ms;
    EP_CHECK_EQ_I64(late_ms > 0 ? (int64_t)late_ms : 0, 0);
}

void expect_waiter_named(const char* text) {
    // NCCL may report a lost rank before the deadline.
    const bool over_network = strstr(text, "network operation ") != NULL;
    if (!over_network) EP_CHECK_STR_CONTAINS(text, " waited ");
    EP_CHECK_STR_CONTAINS(text, "rank ");
}

bool names(const char* text, int rank) {
    char name[16];
    snprintf(name, sizeof(name), "rank %d", rank);
    const char* at = strstr(text, name);
    return at != NULL && (at[strlen(name)] < '0' || at[strlen(name)] > '9');
}

// Whether `text` is of this rank and of the network between nodes, and names its node, the victim with
// its node, and the operation that needed the network.
static bool locates(const DeathRank* self, const char* text) {
    const unsigned there = ep_node_of((unsigned)self->victim);
    char waiter[48];
    char rail_peer[48];
    char partner[48];
    snprintf(waiter, sizeof(waiter), "rank %d of node %u", self->env.rank, ep_node_of((unsigned)self->env.rank));
    snprintf(rail_peer, sizeof(rail_peer), "rank %d (rail peer on node %u)", self->victim, there);
    snprintf(partner, sizeof(partner), "rank %d (node %u)", self->victim, there);
    const char* at = strstr(text, "network operation ");
    unsigned number = 0;
    unsigned operation = 0;
    char mode[4] = "";
    char kind[16] = "";
    const char* format = "network operation %u, %3s %15[a-z] %u";
    const bool has_operation =
        at != NULL && sscanf(at, format, &number, mode, kind, &operation) == 4 &&
        (strcmp(mode, "LL") == 0 || strcmp(mode, "HT") == 0) &&
        (strcmp(kind, "dispatch") == 0 || strcmp(kind, "combine") == 0 || strcmp(kind, "handle") == 0);
    return has_operation && strstr(text, waiter) != NULL &&
           (strstr(text, rail_peer) != NULL || strstr(text, partner) != NULL);
}

void note_text(const DeathRank* self, const char* text) {
    if (names(text, self->victim)) atomic_fetch_add(&self->shared->named, 1);
    if (locates(self, text)) atomic_fetch_add(&self->shared->located, 1);
}

void expect_victim_named(const DeathRank* self) {
    EP_CHECK(atomic_load(&self->shared->named) > 0);
    if (ep_on_host_backend() || ep_num_nodes() == 1) return;
    EP_CHECK(atomic_load(&self->shared->located) > 0);
}

void expect_context_usable(const DeathRank* self) {
    enum { kBytes = 4096 };
    unsigned char sent[kBytes];
    unsigned char back[kBytes];
    for (int i = 0; i < kBytes; ++i) sent[i] = (unsigned char)(i * 7);
    EP_CHECK_CUDA(cudaStreamSynchronize(self->env.stream));
    EP_CHECK_CUDA(cudaGetLastError());
    void* device = ep_device_upload(sent, kBytes);
    EP_CHECK_CUDA(cudaMemsetAsync(device, 0x5a, kBytes / 2, self->env.stream));
    EP_CHECK_CUDA(cudaStreamSynchronize(self->env.stream));
    ep_download(back, device, kBytes);
    memset(sent, 0x5a, kBytes / 2);
    EP_CHECK_EQ_BYTES(back, sent, kBytes);
    ep_device_free(device);
    EP_CHECK_CUDA(cudaDeviceSynchronize());
}

// The nodes without the victim.
static void place_survivor(const DeathRank* self, const EpEnv* env) {
    char split[kMaxRanks + 1] = "";
    strncpy(split, self->split, kMaxRanks);
    if (split[0] != '\0') memmove(&split[self->victim], &split[self->victim + 1], kMaxRanks - (size_t)self->victim);
    ep_place_on_nodes(split, (unsigned)env->rank);
}

void go_on_without_victim(DeathRank* self) {
    EpEnv env = self->env;
    env.size = survivors(self);
    if (env.rank > self->victim) --env.rank;
    place_survivor(self, &env);
    env.comm = open_comm(self, kSecondId, env.rank, env.size);
    RefRun run = open_work(&env, 2);
    ref_run_close(&run);
    EP_CHECK_NCCL(ncclCommDestroy(env.comm));
}

void abort_and_go_on(DeathRank* self) {
    // A thread of the library is still inside NCCL with it, then.
    const bool is_connecting = strstr(ep_last_error(), "which NCCL is still connecting") != NULL;
    if (!is_connecting) EP_CHECK_NCCL(ncclCommAbort(self->env.comm));
    // An abandoned exchange may have left its error on the stream.
    (void)cudaStreamSynchronize(self->env.stream);
    (void)cudaGetLastError();
    expect_context_usable(self);
    go_on_without_victim(self);
    EP_CHECK_CUDA(cudaStreamDestroy(self->env.stream));
}
