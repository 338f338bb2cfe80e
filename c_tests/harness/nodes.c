#define _GNU_SOURCE  // setenv
#include "harness/nodes.h"

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness/check.h"

enum { kIdBytes = 64 };

static unsigned g_num_ranks = 1;
static unsigned g_num_nodes = 1;
static unsigned g_node_of[kEpMaxRanks];

static const char* node_for_the_library(void) { return getenv("EP_TEST_NODE"); }

static void own_id(char* id) {
    const char* chosen = node_for_the_library();
    if (chosen == NULL) chosen = getenv("NCCL_HOSTID");
    if (chosen != NULL && chosen[0] != '\0') {
        strncpy(id, chosen, kIdBytes - 1);
        return;
    }
    FILE* file = fopen("/proc/sys/kernel/random/boot_id", "r");
    EP_REQUIRE(file != NULL && fgets(id, kIdBytes, file) != NULL);
    fclose(file);
}

static void number_nodes(char ids[kEpMaxRanks][kIdBytes], unsigned ranks) {
    g_num_ranks = ranks;
    g_num_nodes = 0;
    for (unsigned rank = 0; rank < ranks; ++rank) {
        unsigned first = 0;
        while (memcmp(ids[first], ids[rank], kIdBytes) != 0) ++first;
        g_node_of[rank] = first == rank ? g_num_nodes++ : g_node_of[first];
    }
}

void ep_find_nodes(void) {
    int ranks = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    EP_REQUIRE(ranks <= kEpMaxRanks);
    char mine[kIdBytes] = "";
    char all[kEpMaxRanks][kIdBytes];
    own_id(mine);
    MPI_Allgather(mine, kIdBytes, MPI_CHAR, all, kIdBytes, MPI_CHAR, MPI_COMM_WORLD);
    number_nodes(all, (unsigned)ranks);
}

void ep_place_on_nodes(const char* split, unsigned rank) {
    const unsigned ranks = (unsigned)strlen(split);
    if (ranks == 0) return;
    EP_REQUIRE(ranks <= kEpMaxRanks && rank < ranks);
    char all[kEpMaxRanks][kIdBytes];
    memset(all, 0, sizeof(all));
    for (unsigned i = 0; i < ranks; ++i) snprintf(all[i], kIdBytes, "node%c", split[i]);
    number_nodes(all, ranks);
    EP_REQUIRE(setenv("NCCL_HOSTID", all[rank], 1) == 0);
}

void ep_enter_node(void) {
    const char* node = node_for_the_library();
    if (node != NULL) EP_REQUIRE(setenv("NCCL_HOSTID", node, 1) == 0);
}

unsigned ep_num_nodes(void) { return g_num_nodes; }

unsigned ep_node_of(unsigned rank) { return g_node_of[rank]; }

static unsigned ranks_of(unsigned node, unsigned below) {
    unsigned count = 0;
    for (unsigned rank = 0; rank < below; ++rank) count += g_node_of[rank] == node;
    return count;
}

unsigned ep_rail_peer(unsigned rank, unsigned node) {
    unsigned index = ranks_of(g_node_of[rank], rank) % ranks_of(node, g_num_ranks);
    unsigned peer = 0;
    while (g_node_of[peer] != node || index-- > 0) ++peer;
    return peer;
}

unsigned ep_node_distance(unsigned rank, unsigned other) {
    return (g_node_of[rank] + g_num_nodes - g_node_of[other]) % g_num_nodes;
}

bool ep_sums_are_invariant(void) {
    const char* name = getenv("NCCL_EP_NODE_SUMS");
    return g_num_nodes > 1 && name != NULL && strcmp(name, "invariant") == 0;
}

unsigned ep_distance_in_sum(unsigned rank, unsigned place) {
    if (!ep_sums_are_invariant()) return place;
    return (g_node_of[rank] + g_num_nodes - place) % g_num_nodes;
}
