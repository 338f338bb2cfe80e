// The part of MPI that programs here use, where the machine has no MPI for their architecture: all
// ranks are forked before main, as many as EP_TEST_RANKS says, and talk through shared memory.
#pragma once

#include <sys/cdefs.h>

__BEGIN_DECLS

typedef enum { MPI_BYTE, MPI_CHAR, MPI_INT, MPI_UNSIGNED, MPI_UINT64_T } MPI_Datatype;
typedef enum { MPI_SUM, MPI_MAX } MPI_Op;
typedef enum { MPI_COMM_WORLD } MPI_Comm;
typedef enum { MPI_INFO_NULL } MPI_Info;
typedef int MPI_Request;
typedef int MPI_Status;

enum { MPI_SUCCESS = 0, MPI_COMM_TYPE_SHARED = 0 };

#define MPI_IN_PLACE ((void*)1)
#define MPI_STATUS_IGNORE ((MPI_Status*)0)

int MPI_Init(int* argc, char*** argv);
int MPI_Initialized(int* flag);
int MPI_Finalize(void);
int MPI_Finalized(int* flag);
int MPI_Abort(MPI_Comm comm, int status);

int MPI_Comm_rank(MPI_Comm comm, int* rank);
int MPI_Comm_size(MPI_Comm comm, int* size);
// All ranks are on one host: the new communicator is the same.
int MPI_Comm_split_type(MPI_Comm comm, int type, int key, MPI_Info info, MPI_Comm* split);
int MPI_Comm_free(MPI_Comm* comm);

int MPI_Barrier(MPI_Comm comm);
// Blocks; its request is complete.
int MPI_Ibarrier(MPI_Comm comm, MPI_Request* request);
int MPI_Test(MPI_Request* request, int* flag, MPI_Status* status);
int MPI_Wait(MPI_Request* request, MPI_Status* status);
int MPI_Bcast(void* buffer, int count, MPI_Datatype type, int root, MPI_Comm comm);
int MPI_Allgather(const void* send, int send_count, MPI_Datatype send_type, void* receive,
                  int receive_count, MPI_Datatype receive_type, MPI_Comm comm);
int MPI_Allreduce(const void* send, void* receive, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm);

__END_DECLS
