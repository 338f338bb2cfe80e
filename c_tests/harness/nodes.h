// Which ranks are on which node, as the library sees it: by NCCL_HOSTID, else by the kernel's boot
// id. A test that gives processes different NCCL_HOSTIDs makes several nodes of one machine.
#pragma once

#include <stdbool.h>
#include <sys/cdefs.h>

__BEGIN_DECLS

enum { kEpMaxRanks = 64 };

// Collective over MPI_COMM_WORLD; ep_init_mpi calls it.
void ep_find_nodes(void);

// From here on NCCL_HOSTID is EP_TEST_NODE, if that is set. ep_init_device calls it behind NCCL, which reads
// NCCL_HOSTID once: so ranks of one GPU may be on one node for the library, though NCCL wants a host for each.
void ep_enter_node(void);

// The same without MPI: puts this process, `rank` of the ranks that `split` has a character for, on the
// node with the name of that character, and sets its NCCL_HOSTID. An empty split changes nothing.
void ep_place_on_nodes(const char* split, unsigned rank);

unsigned ep_num_nodes(void);

// Nodes are numbered in the order of their lowest ranks.
unsigned ep_node_of(unsigned rank);

// The rank of `node` that takes what `rank` sends there: the one with its local index, modulo the
// number of ranks there.
unsigned ep_rail_peer(unsigned rank, unsigned node);

// How many nodes before that of `rank` the one of `other` comes, around the ring of nodes in the
// order of their lowest ranks; 0 for the same node.
unsigned ep_node_distance(unsigned rank, unsigned other);

// Whether groups that are made now add the sums of nodes in ascending order, all rounded:
// NCCL_EP_NODE_SUMS=invariant. Else the node of `rank` comes first, unrounded, then by distance.
bool ep_sums_are_invariant(void);
// The distance of the node that comes as number `place` in the sums of a token of `rank`.
unsigned ep_distance_in_sum(unsigned rank, unsigned place);

__END_DECLS
