# Debian's cross compiler for aarch64, Debian's libraries for it in build/aarch64-root (scripts/setup cross), and qemu, which
# runs what was built.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)

get_filename_component(muster_aarch64_root "${CMAKE_CURRENT_LIST_DIR}/../../build/aarch64-root" ABSOLUTE)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH "${muster_aarch64_root}")
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
# The compiler brings the C library and its own; these are the headers and libraries of the other packages.
foreach(language C CXX)
  set(CMAKE_${language}_FLAGS_INIT
    "-isystem ${muster_aarch64_root}/usr/include -isystem ${muster_aarch64_root}/usr/include/aarch64-linux-gnu")
endforeach()
set(CMAKE_EXE_LINKER_FLAGS_INIT
  "-Wl,-rpath-link,${muster_aarch64_root}/usr/lib/aarch64-linux-gnu:${muster_aarch64_root}/lib/aarch64-linux-gnu")
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L "${muster_aarch64_root}")
