# Defines the target ort_ops_highway and the function ort_ops_install_highway. Highway must be 1.2 or newer: older ones truncate
# where they should round to 16-bit floats. Looks for a system package, then fetches Debian's package or the source.
include(Fetch)

set(minimum 1.2.0)
set(ORT_OPS_HIGHWAY_LIBRARY "")  # a shared library that must be installed beside ours

find_package(hwy ${minimum} CONFIG QUIET)
if(hwy_FOUND)
  message(STATUS "Highway: ${hwy_DIR}")
else()
  ort_ops_fetch_debian_packages(debian trixie libhwy-dev libhwy1t64)
  file(GLOB_RECURSE ORT_OPS_HIGHWAY_LIBRARY "${debian}/usr/lib/*/libhwy.so.1")
  if(debian AND ORT_OPS_HIGHWAY_LIBRARY)
    message(STATUS "Highway: ${ORT_OPS_HIGHWAY_LIBRARY}")
    add_library(hwy::hwy SHARED IMPORTED)
    set_target_properties(hwy::hwy PROPERTIES
      IMPORTED_LOCATION "${ORT_OPS_HIGHWAY_LIBRARY}"
      INTERFACE_INCLUDE_DIRECTORIES "${debian}/usr/include"
      INTERFACE_COMPILE_DEFINITIONS HWY_SHARED_DEFINE)
  else()
    set(url "https://github.com/google/highway/archive/refs/tags/${minimum}.tar.gz")
    ort_ops_fetch_archive(archive highway "${url}")
    if(NOT archive)
      message(FATAL_ERROR
        "Highway ${minimum} or newer was not found, and neither Debian's package nor ${url} could be fetched. "
        "Install your distribution's Highway development package (libhwy-dev, highway-devel, highway), or unpack that archive, "
        "build and install it, and pass -Dhwy_DIR=PREFIX/lib/cmake/hwy (with pip: CMAKE_ARGS=-Dhwy_DIR=...).")
    endif()
    foreach(part TESTS EXAMPLES CONTRIB INSTALL)
      set(HWY_ENABLE_${part} OFF CACHE INTERNAL "")
    endforeach()
    set(BUILD_SHARED_LIBS OFF)
    add_subdirectory("${archive}/highway-${minimum}" highway EXCLUDE_FROM_ALL)
    add_library(hwy::hwy ALIAS hwy)
  endif()
endif()

add_library(ort_ops_highway INTERFACE)
target_link_libraries(ort_ops_highway INTERFACE hwy::hwy)

# A fetched shared Highway exists on no other machine: it goes into the wheel, under the name that the loader asks for.
function(ort_ops_install_highway)
  if(ORT_OPS_HIGHWAY_LIBRARY)
    file(REAL_PATH "${ORT_OPS_HIGHWAY_LIBRARY}" real_file)
    install(FILES "${real_file}" DESTINATION ort_ops RENAME libhwy.so.1)
  endif()
endfunction()
