# In the place of CMake's own: the CPU stand-ins for the CUDA runtime, with CUDA's headers.
add_library(CUDA::cudart UNKNOWN IMPORTED)
set_target_properties(CUDA::cudart PROPERTIES
    IMPORTED_LOCATION "${STAND_INS}"
    INTERFACE_INCLUDE_DIRECTORIES "$ENV{CUDA_HOME}/include;$ENV{NCCL_INCLUDE}")
set(CUDAToolkit_FOUND TRUE)
