#define _GNU_SOURCE  // setenv
#include "harness/nodes.h"

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness/harness.h"

enum { kIdBytes = 64 };

static unsigned g_num_nodes = 1;
static unsigned g_node_of[kEpMaxRanks];

static void number_nodes(char ids[kEpMaxRanks][kIdBytes], unsigned ranks) {
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
    const char* id = getenv("NCCL_HOSTID");
    if (id != NULL) strncpy(mine, id, kIdBytes - 1);
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

unsigned ep_num_nodes(void) { return g_num_nodes; }

unsigned ep_node_distance(unsigned rank, unsigned other) {
    return (g_node_of[rank] + g_num_nodes - g_node_of[other]) % g_num_nodes;
}
