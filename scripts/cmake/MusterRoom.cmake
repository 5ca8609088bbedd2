# muster_room(NAME SOURCES file… [LINKS target…])
#
# A folder of src/ as a library of its own: it compiles with the include paths of what it LINKS and no others, which
# is what keeps MPI, HDF5, spdlog and libtorch in the rooms where they belong. All rooms together are libmuster.
function(muster_room NAME)
  cmake_parse_arguments(PARSE_ARGV 1 room "" "" "SOURCES;LINKS")
  if(NOT room_SOURCES)
    return()
  endif()
  add_library(muster_${NAME} OBJECT ${room_SOURCES})
  target_include_directories(muster_${NAME} PRIVATE "${PROJECT_SOURCE_DIR}/include" "${PROJECT_SOURCE_DIR}/src")
  target_compile_options(muster_${NAME} PRIVATE -Wall -Wextra)
  # g++ 12 warns wrongly about "text" + std::string (its bug 105329).
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    target_compile_options(muster_${NAME} PRIVATE -Wno-restrict)
  endif()
  target_link_libraries(muster_${NAME} PRIVATE ${room_LINKS})
  set_property(GLOBAL APPEND PROPERTY MUSTER_ROOMS ${NAME})
endfunction()
