# Sets ORT_OPS_ONNXRUNTIME_INCLUDE_DIR, the directory of onnxruntime_c_api.h (1.18 or newer; no library is linked). Looks at
# ONNXRUNTIME_INCLUDE_DIR, then for a system package, then fetches Debian's package or the official release archive.
include(Fetch)

set(ONNXRUNTIME_INCLUDE_DIR "" CACHE PATH "Directory with onnxruntime_c_api.h")
set(layouts onnxruntime onnxruntime/core/session include)

if(ONNXRUNTIME_INCLUDE_DIR)
  find_path(ORT_OPS_ONNXRUNTIME_INCLUDE_DIR onnxruntime_c_api.h PATHS "${ONNXRUNTIME_INCLUDE_DIR}"
    PATH_SUFFIXES ${layouts} NO_DEFAULT_PATH)
  if(NOT ORT_OPS_ONNXRUNTIME_INCLUDE_DIR)
    message(FATAL_ERROR "ONNXRUNTIME_INCLUDE_DIR is ${ONNXRUNTIME_INCLUDE_DIR}, but onnxruntime_c_api.h is not there.")
  endif()
else()
  find_path(ORT_OPS_ONNXRUNTIME_INCLUDE_DIR onnxruntime_c_api.h PATH_SUFFIXES ${layouts})
endif()

if(NOT ORT_OPS_ONNXRUNTIME_INCLUDE_DIR)
  ort_ops_fetch_debian_packages(debian trixie libonnxruntime-dev)
  find_path(ORT_OPS_ONNXRUNTIME_INCLUDE_DIR onnxruntime_c_api.h PATHS "${debian}/usr/include"
    PATH_SUFFIXES ${layouts} NO_DEFAULT_PATH)
endif()

if(NOT ORT_OPS_ONNXRUNTIME_INCLUDE_DIR)
  set(release 1.21.0)
  set(url "https://github.com/microsoft/onnxruntime/releases/download/v${release}/onnxruntime-linux-x64-${release}.tgz")
  ort_ops_fetch_archive(archive onnxruntime "${url}")
  find_path(ORT_OPS_ONNXRUNTIME_INCLUDE_DIR onnxruntime_c_api.h
    PATHS "${archive}/onnxruntime-linux-x64-${release}" PATH_SUFFIXES ${layouts} NO_DEFAULT_PATH)
endif()

if(NOT ORT_OPS_ONNXRUNTIME_INCLUDE_DIR)
  message(FATAL_ERROR
    "The header onnxruntime_c_api.h was not found, and neither Debian's package nor ${url} could be fetched. "
    "Install your distribution's onnxruntime development package, or download any ONNX Runtime release from 1.18 and "
    "pass its include directory: -DONNXRUNTIME_INCLUDE_DIR=DIR (with pip: CMAKE_ARGS=-DONNXRUNTIME_INCLUDE_DIR=DIR).")
endif()
message(STATUS "ONNX Runtime headers: ${ORT_OPS_ONNXRUNTIME_INCLUDE_DIR}")
