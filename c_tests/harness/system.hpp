// The headers of the system that most C++ units include, to be parsed once for all of them.
#include <algorithm>
#include <cuda_runtime.h>
#include <functional>
#include <mpi.h>
#include <nccl.h>
#include <optional>
#include <string>
#include <vector>
