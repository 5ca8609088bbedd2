# The libraries that muster stands on. What is already there (modules of a cluster, CMAKE_PREFIX_PATH, Torch_DIR,
# an active virtual environment) is used as it is; after that the environment that scripts/setup makes.

find_package(Threads REQUIRED)
find_package(ZLIB REQUIRED)
include(CheckLanguage)
check_language(Fortran)  # for the solver's side of live training
if(CMAKE_Fortran_COMPILER)
  enable_language(Fortran)
  find_package(MPI QUIET COMPONENTS Fortran)
endif()
find_package(MPI REQUIRED COMPONENTS C)
find_package(HDF5 REQUIRED COMPONENTS C)
find_package(CLI11 REQUIRED)
find_package(spdlog REQUIRED)
find_package(nlohmann_json REQUIRED)

# ISA-L, for checksums, brings no package of CMake's.
find_path(muster_isal_include isa-l/crc.h REQUIRED)
find_library(muster_isal_library isal REQUIRED)
mark_as_advanced(muster_isal_include muster_isal_library)
add_library(muster_isal INTERFACE)
target_include_directories(muster_isal SYSTEM INTERFACE $<BUILD_INTERFACE:${muster_isal_include}>)
target_link_libraries(muster_isal INTERFACE "${muster_isal_library}")

# What chunks of HDF5 datasets are decoded with, beside zlib. Where one of these is not here, HDF5 decodes such chunks, if
# it has the filter.
find_path(muster_libdeflate_include libdeflate.h)
find_library(muster_libdeflate_library deflate)
find_path(muster_szip_include szlib.h)
find_library(muster_szip_library sz)
find_path(muster_lzf_include lzf.h PATH_SUFFIXES liblzf)
find_library(muster_lzf_library lzf)
find_path(muster_lz4_include lz4.h)
find_library(muster_lz4_library lz4)
find_path(muster_zstd_include zstd.h)
find_library(muster_zstd_library zstd)
find_path(muster_blosc_include blosc.h)
find_library(muster_blosc_library blosc)
add_library(muster_codecs INTERFACE)
target_link_libraries(muster_codecs INTERFACE ZLIB::ZLIB)
foreach(codec IN ITEMS libdeflate szip lzf lz4 zstd blosc)
  mark_as_advanced(muster_${codec}_include muster_${codec}_library)
  if(NOT muster_${codec}_include OR NOT muster_${codec}_library)
    message(STATUS "chunks: decoded without ${codec}, which was not found")
    continue()
  endif()
  string(TOUPPER ${codec} upper)
  target_include_directories(muster_codecs SYSTEM INTERFACE $<BUILD_INTERFACE:${muster_${codec}_include}>)
  target_compile_definitions(muster_codecs INTERFACE $<BUILD_INTERFACE:MUSTER_HAS_${upper}>)
  target_link_libraries(muster_codecs INTERFACE "${muster_${codec}_library}")
endforeach()

# What `muster convert npz` reads archives with.
find_path(muster_libzip_include zip.h)
find_library(muster_libzip_library zip)
mark_as_advanced(muster_libzip_include muster_libzip_library)
add_library(muster_libzip INTERFACE)
if(muster_libzip_include AND muster_libzip_library)
  target_include_directories(muster_libzip SYSTEM INTERFACE $<BUILD_INTERFACE:${muster_libzip_include}>)
  target_compile_definitions(muster_libzip INTERFACE $<BUILD_INTERFACE:MUSTER_HAS_LIBZIP>)
  target_link_libraries(muster_libzip INTERFACE "${muster_libzip_library}")
else()
  message(STATUS "muster convert npz: not built, since libzip was not found")
endif()

# What TensorBoard's files are written with. protozero is headers only.
find_path(muster_protozero_include protozero/pbf_writer.hpp)
mark_as_advanced(muster_protozero_include)
find_package(PNG QUIET)
if(muster_protozero_include AND PNG_FOUND)
  add_library(muster_tensorboard_libraries INTERFACE)
  target_include_directories(muster_tensorboard_libraries SYSTEM INTERFACE
    $<BUILD_INTERFACE:${muster_protozero_include}> $<BUILD_INTERFACE:${PNG_INCLUDE_DIRS}>)
  target_link_libraries(muster_tensorboard_libraries INTERFACE ${PNG_LIBRARIES})
else()
  message(STATUS "--tensorboard: not built, since protozero or libpng was not found")
endif()

# What `muster report` reads rows with, and the library of plots that its pages carry along.
find_package(simdjson QUIET)
find_path(muster_dygraphs dygraph.min.js
  PATHS /usr/share/javascript/dygraphs /usr/share/nodejs/dygraphs/dist PATH_SUFFIXES share/javascript/dygraphs)
mark_as_advanced(muster_dygraphs simdjson_DIR)
set(muster_report_lacks "")
set(MUSTER_REPORT_PACKAGES "")
if(NOT simdjson_FOUND OR simdjson_VERSION VERSION_LESS 3.0)
  list(APPEND muster_report_lacks "simdjson 3.0 or later")
  list(APPEND MUSTER_REPORT_PACKAGES libsimdjson-dev)
endif()
if(NOT muster_dygraphs)
  list(APPEND muster_report_lacks dygraphs)
  list(APPEND MUSTER_REPORT_PACKAGES libjs-dygraphs)
endif()
list(JOIN muster_report_lacks " and " MUSTER_REPORT_LACKS)
list(JOIN MUSTER_REPORT_PACKAGES " and " MUSTER_REPORT_PACKAGES)
if(MUSTER_REPORT_LACKS)
  message(STATUS "muster report: not built, since ${MUSTER_REPORT_LACKS} was not found")
endif()

# Where a libtorch is when the user named none: the wheel of a virtual environment.
file(GLOB muster_torch_hints
  "$ENV{VIRTUAL_ENV}/lib*/python3*/site-packages/torch/share/cmake/Torch"
  "$ENV{CONDA_PREFIX}/lib*/python3*/site-packages/torch/share/cmake/Torch"
  "${PROJECT_SOURCE_DIR}/build/venv/lib*/python3*/site-packages/torch/share/cmake/Torch")
# The wheel's configuration warns about kineto, which nothing here uses.
set(muster_warnings_were "${CMAKE_MESSAGE_LOG_LEVEL}")
# A CUDA build of libtorch asks for a whole CUDA toolkit and enables its compiler, unless this target is there already.
# muster has no CUDA sources: it links libtorch's own libraries, which find theirs.
if(NOT TARGET torch::cudart)
  add_library(torch::cudart INTERFACE IMPORTED)
endif()
set(CMAKE_MESSAGE_LOG_LEVEL ERROR)
find_package(Torch QUIET)
if(NOT Torch_FOUND)
  find_package(Torch QUIET HINTS ${muster_torch_hints})
endif()
set(CMAKE_MESSAGE_LOG_LEVEL "${muster_warnings_were}")
if(NOT Torch_FOUND)
  message(FATAL_ERROR "muster needs libtorch, and none was found. Run scripts/setup, which brings the CPU build, "
                      "or name one: -DTorch_DIR=…/share/cmake/Torch or CMAKE_PREFIX_PATH.")
endif()
message(STATUS "libtorch: ${TORCH_INSTALL_PREFIX}")

# torch's own backends of a process group, where they compile and link: muster_gloo and muster_nccl are then targets.
# libtorch holds both, but not the headers of the libraries below them; no library of theirs is linked. ARGN: folders
# of headers, HEADER's perhaps among them.
include(CheckCXXSourceCompiles)
function(muster_torch_backend NAME HEADER CLASS)
  string(TOUPPER ${NAME} upper)
  find_path(muster_${NAME}_include ${HEADER} HINTS ${ARGN})
  mark_as_advanced(muster_${NAME}_include)
  if(NOT muster_${NAME}_include)
    message(STATUS "${NAME}: none, since ${HEADER} is not here")
    return()
  endif()
  # libtorch by its files: its targets name others that the small project of the check does not know.
  file(GLOB CMAKE_REQUIRED_LIBRARIES "${TORCH_INSTALL_PREFIX}/lib/libc10*.so" "${TORCH_INSTALL_PREFIX}/lib/libtorch.so"
       "${TORCH_INSTALL_PREFIX}/lib/libtorch_c*.so")
  set(CMAKE_REQUIRED_LINK_OPTIONS -Wl,--allow-shlib-undefined)
  set(CMAKE_REQUIRED_INCLUDES "${muster_${NAME}_include}" ${TORCH_INCLUDE_DIRS} ${ARGN})
  set(CMAKE_REQUIRED_DEFINITIONS -DUSE_C10D_${upper})
  check_cxx_source_compiles("
    #include <torch/csrc/distributed/c10d/${CLASS}.hpp>
    int main() { return c10d::${CLASS}::Options::create()->timeout.count() == 0; }" MUSTER_HAS_${upper})
  if(MUSTER_HAS_${upper})
    add_library(muster_${NAME} INTERFACE)
    target_include_directories(muster_${NAME} SYSTEM INTERFACE "${muster_${NAME}_include}" ${ARGN})
    target_compile_definitions(muster_${NAME} INTERFACE USE_C10D_${upper})
  else()
    message(STATUS "${NAME}: none, since ${CLASS}.hpp of this libtorch does not compile; CMakeError.log says why")
    unset(MUSTER_HAS_${upper} CACHE)  # what is missing may come
  endif()
endfunction()
muster_torch_backend(gloo gloo/config.h ProcessGroupGloo)
if(TARGET torch_cuda)
  # pip puts the headers of NCCL and most of CUDA's beside torch; the rest, which this one stands for, and all of them
  # for a libtorch of another kind, are a toolkit's.
  file(GLOB muster_cuda_headers "${TORCH_INSTALL_PREFIX}/../nvidia/*/include")
  find_path(muster_cuda_include crt/host_config.h HINTS ${muster_cuda_headers} ENV CUDA_HOME ENV CUDA_PATH
            PATHS /usr/local/cuda PATH_SUFFIXES include)
  mark_as_advanced(muster_cuda_include)
  list(APPEND muster_cuda_headers "${muster_cuda_include}" "$ENV{NCCL_HOME}/include")
  muster_torch_backend(nccl nccl.h ProcessGroupNCCL ${muster_cuda_headers})
endif()

# MPI and HDF5 as one target each. HDF5's header includes mpi.h where HDF5 is the parallel build; the C++ bindings
# of MPI are long removed and must not be dragged in.
add_library(muster_mpi INTERFACE)
target_link_libraries(muster_mpi INTERFACE MPI::MPI_C)
target_compile_definitions(muster_mpi INTERFACE OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)
add_library(muster_libhdf5 INTERFACE)
target_include_directories(muster_libhdf5 SYSTEM INTERFACE ${HDF5_INCLUDE_DIRS})
target_link_libraries(muster_libhdf5 INTERFACE ${HDF5_C_LIBRARIES})
if(HDF5_IS_PARALLEL)
  target_link_libraries(muster_libhdf5 INTERFACE muster_mpi)
endif()

# Within another project that project links muster, and so must see what muster is linked with.
if(NOT PROJECT_IS_TOP_LEVEL)
  get_property(muster_imported DIRECTORY PROPERTY IMPORTED_TARGETS)
  set_property(TARGET ${muster_imported} PROPERTY IMPORTED_GLOBAL TRUE)
endif()
