#include "harness/nodes.h"

#include <mpi.h>
#include <stdlib.h>
#include <string.h>

#include "harness/harness.h"

enum { kIdBytes = 64 };

static unsigned g_num_nodes = 1;
static unsigned g_node_of[kEpMaxRanks];

void ep_find_nodes(void) {
    int ranks = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    EP_REQUIRE(ranks <= kEpMaxRanks);
    char mine[kIdBytes] = "";
    char all[kEpMaxRanks][kIdBytes];
    const char* id = getenv("NCCL_HOSTID");
    if (id != NULL) strncpy(mine, id, kIdBytes - 1);
    MPI_Allgather(mine, kIdBytes, MPI_CHAR, all, kIdBytes, MPI_CHAR, MPI_COMM_WORLD);
    g_num_nodes = 0;
    for (int rank = 0; rank < ranks; ++rank) {
        int first = 0;
        while (memcmp(all[first], all[rank], kIdBytes) != 0) ++first;
        g_node_of[rank] = first == rank ? g_num_nodes++ : g_node_of[first];
    }
}

unsigned ep_num_nodes(void) { return g_num_nodes; }

unsigned ep_node_distance(unsigned rank, unsigned other) {
    return (g_node_of[rank] + g_num_nodes - g_node_of[other]) % g_num_nodes;
}
