# Sets ORT_OPS_CUDA_FOUND: whether the CUDA kernels are built. ORT_OPS_CUDA is ON (an error where nvcc is
# missing), OFF, or AUTO. Enables the language CUDA for every architecture of the list that this nvcc knows,
# and sets ORT_OPS_CUDA_ARCHITECTURES_TEXT to the list as ort_ops_cuda_architectures tells it.
include(CheckLanguage)

set(ORT_OPS_CUDA AUTO CACHE STRING "Build the CUDA kernels: ON, OFF, or AUTO (where nvcc is found)")
set_property(CACHE ORT_OPS_CUDA PROPERTY STRINGS AUTO ON OFF)
# A device runs what was built for its own major version and no newer minor one: 80 serves 86 to 89, 100 serves 103.
set(ORT_OPS_CUDA_ARCHITECTURES 75 80 90 100 120
  CACHE STRING "Architectures to build the CUDA kernels for")

set(ORT_OPS_CUDA_FOUND OFF)
if(ORT_OPS_CUDA STREQUAL "AUTO")
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    message(STATUS "CUDA: no nvcc, so no CUDA kernels")
    return()
  endif()
elseif(NOT ORT_OPS_CUDA)
  return()
endif()

set(CMAKE_CUDA_ARCHITECTURES OFF) # set below, when it is known which ones this nvcc has
enable_language(CUDA)
set(ORT_OPS_CUDA_FOUND ON)

execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --list-gpu-arch
  OUTPUT_VARIABLE listed RESULT_VARIABLE failed)
if(failed)
  message(FATAL_ERROR
    "${CMAKE_CUDA_COMPILER} --list-gpu-arch failed; the CUDA kernels need CUDA 11.8 or newer. "
    "Put a newer nvcc on the PATH, or build without CUDA: -DORT_OPS_CUDA=OFF.")
endif()
set(CMAKE_CUDA_ARCHITECTURES "")
set(names "")
foreach(architecture IN LISTS ORT_OPS_CUDA_ARCHITECTURES)
  if(listed MATCHES "compute_${architecture}(\n|$)")
    list(APPEND CMAKE_CUDA_ARCHITECTURES "${architecture}-real")
    list(APPEND names "sm_${architecture}")
    set(newest "${architecture}")
  endif()
endforeach()
if(NOT names)
  message(FATAL_ERROR "${CMAKE_CUDA_COMPILER} knows none of the architectures ${ORT_OPS_CUDA_ARCHITECTURES}.")
endif()
# Newer devices' drivers compile the newest one's PTX.
list(APPEND CMAKE_CUDA_ARCHITECTURES "${newest}-virtual")
list(APPEND names "compute_${newest}")
list(JOIN names "," ORT_OPS_CUDA_ARCHITECTURES_TEXT)
message(STATUS "CUDA: nvcc ${CMAKE_CUDA_COMPILER_VERSION} for ${ORT_OPS_CUDA_ARCHITECTURES_TEXT}")

set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static) # so that the library loads where there is no CUDA
