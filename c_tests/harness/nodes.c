#include "harness/nodes.h"

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "harness/harness.h"

enum { kIdBytes = 64 };

static unsigned g_num_ranks = 1;
static unsigned g_num_nodes = 1;
static unsigned g_node_of[kEpMaxRanks];

static void own_id(char* id) {
    const char* chosen = getenv("NCCL_HOSTID");
    if (chosen != NULL && chosen[0] != '\0') {
        strncpy(id, chosen, kIdBytes - 1);
        return;
    }
    FILE* file = fopen("/proc/sys/kernel/random/boot_id", "r");
    EP_REQUIRE(file != NULL && fgets(id, kIdBytes, file) != NULL);
    fclose(file);
}

void ep_find_nodes(void) {
    int ranks = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    EP_REQUIRE(ranks <= kEpMaxRanks);
    char mine[kIdBytes] = "";
    char all[kEpMaxRanks][kIdBytes];
    own_id(mine);
    MPI_Allgather(mine, kIdBytes, MPI_CHAR, all, kIdBytes, MPI_CHAR, MPI_COMM_WORLD);
    g_num_ranks = (unsigned)ranks;
    g_num_nodes = 0;
    for (int rank = 0; rank < ranks; ++rank) {
        int first = 0;
        while (memcmp(all[first], all[rank], kIdBytes) != 0) ++first;
        g_node_of[rank] = first == rank ? g_num_nodes++ : g_node_of[first];
    }
}

unsigned ep_num_nodes(void) { return g_num_nodes; }

unsigned ep_node_of(unsigned rank) { return g_node_of[rank]; }

static unsigned ranks_of(unsigned node, unsigned below) {
    unsigned count = 0;
    for (unsigned rank = 0; rank < below; ++rank) count += g_node_of[rank] == node;
    return count;
}

unsigned ep_gateway(unsigned rank, unsigned node) {
    unsigned index = ranks_of(g_node_of[rank], rank) % ranks_of(node, g_num_ranks);
    unsigned gateway = 0;
    while (g_node_of[gateway] != node || index-- > 0) ++gateway;
    return gateway;
}

unsigned ep_node_distance(unsigned rank, unsigned other) {
    return (g_node_of[rank] + g_num_nodes - g_node_of[other]) % g_num_nodes;
}
