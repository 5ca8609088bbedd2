# The root of muster, which is not the project's where tests/cross builds single rooms.
get_filename_component(muster_root "${CMAKE_CURRENT_LIST_DIR}/../.." ABSOLUTE)

# muster_hide_symbols(TARGET): a shared library exports what is marked in its sources (muster/detail/export.hpp and
# base/export.hpp) and nothing else.
function(muster_hide_symbols TARGET)
  set_target_properties(${TARGET} PROPERTIES CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
endfunction()

# muster_precompiled(NAME HEADERS header… LINKS target… [OPTIONS option…]): headers that many targets include, parsed once
# for all of them. g++ takes the result for every -O but -O0; where a target's options do not fit, it warns and reads the
# headers themselves.
function(muster_precompiled NAME)
  cmake_parse_arguments(PARSE_ARGV 1 headers "" "" "HEADERS;LINKS;OPTIONS")
  set(source "${CMAKE_CURRENT_BINARY_DIR}/precompiled_${NAME}.cpp")
  file(CONFIGURE OUTPUT "${source}" CONTENT "// The headers come with the compiler's options.\n")
  add_library(muster_precompiled_${NAME} OBJECT EXCLUDE_FROM_ALL "${source}")
  target_precompile_headers(muster_precompiled_${NAME} PRIVATE ${headers_HEADERS})
  target_compile_options(muster_precompiled_${NAME} PRIVATE ${headers_OPTIONS})
  target_link_libraries(muster_precompiled_${NAME} PRIVATE ${headers_LINKS})
endfunction()

# muster_precompile(NAME target…): these targets use the precompiled headers NAME. They are all compiled as for a shared
# library (-fPIC): g++ takes no precompiled header that was made with another kind of code.
function(muster_precompile NAME)
  foreach(target IN LISTS ARGN)
    target_precompile_headers(${target} REUSE_FROM muster_precompiled_${NAME})
    get_target_property(type ${target} TYPE)
    if(type STREQUAL EXECUTABLE)
      set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
      target_compile_options(${target} PRIVATE -fPIC)
    endif()
  endforeach()
endfunction()

# muster_link_options(TARGET): how a shared library is linked. Templates of the standard library and of torch are visible
# in spite of the compiler's options, so the linker hides them; and what a library uses of another one must be exported.
function(muster_link_options TARGET)
  set(exports "${muster_root}/src/exports.map")
  target_link_options(${TARGET} PRIVATE "LINKER:--version-script=${exports}")
  set_property(TARGET ${TARGET} APPEND PROPERTY LINK_DEPENDS "${exports}")
  if(NOT MUSTER_SANITIZE)  # whose functions come with the program
    target_link_options(${TARGET} PRIVATE LINKER:-z,defs)
  endif()
endfunction()

# muster_room(NAME [CALM] [FEW_TORCH_HEADERS] SOURCES file… [LINKS target…])
#
# A folder of src/ compiles with the include paths of what it LINKS and no others, which is what keeps MPI, HDF5, spdlog
# and libtorch in the rooms where they belong.
# CALM: nothing in it runs in a step, a batch, a save or the start of a rank, so it is compiled with -O1, in three quarters
# of the time.
# FEW_TORCH_HEADERS: it compiles in less time without the precompiled ones.
# Where CMake puts files together, up to 16 of a room are one unit: each unit pays for what the headers instantiate.
function(muster_room NAME)
  cmake_parse_arguments(PARSE_ARGV 1 room "CALM;FEW_TORCH_HEADERS" "" "SOURCES;LINKS")
  add_library(muster_room_${NAME} OBJECT ${room_SOURCES})
  target_include_directories(muster_room_${NAME} PRIVATE "${muster_root}/include" "${muster_root}/src")
  target_compile_options(muster_room_${NAME} PRIVATE -Wall -Wextra)
  muster_hide_symbols(muster_room_${NAME})
  # g++ 12 warns wrongly about "text" + std::string (its bug 105329).
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    target_compile_options(muster_room_${NAME} PRIVATE -Wno-restrict)
  endif()
  if(room_CALM)
    target_compile_options(muster_room_${NAME} PRIVATE $<$<CONFIG:Release>:-O1>)
  endif()
  target_link_libraries(muster_room_${NAME} PRIVATE ${room_LINKS})
  set_target_properties(muster_room_${NAME} PROPERTIES UNITY_BUILD_BATCH_SIZE 16)
  if("torch" IN_LIST room_LINKS AND NOT room_FEW_TORCH_HEADERS)
    muster_precompile(torch muster_room_${NAME})
  endif()
endfunction()

# muster_library(NAME ROOMS room… [LINKS target…])
#
# Rooms as one library, muster::NAME: a component of find_package(muster).
function(muster_library NAME)
  cmake_parse_arguments(PARSE_ARGV 1 library "" "" "ROOMS;LINKS")
  add_library(muster_${NAME})
  add_library(muster::${NAME} ALIAS muster_${NAME})
  foreach(room IN LISTS library_ROOMS)
    add_subdirectory(${room})
    target_sources(muster_${NAME} PRIVATE $<TARGET_OBJECTS:muster_room_${room}>)
  endforeach()
  set_target_properties(muster_${NAME} PROPERTIES
    EXPORT_NAME ${NAME} VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}
    MUSTER_ROOMS "${library_ROOMS}" MUSTER_LINKS "${library_LINKS}")
  target_link_libraries(muster_${NAME} PRIVATE ${library_LINKS})
  if(BUILD_SHARED_LIBS)
    muster_link_options(muster_${NAME})
  endif()
  set_property(GLOBAL APPEND PROPERTY MUSTER_LIBRARIES ${NAME})
endfunction()

# muster_addon(NAME [LINKS target…]): a room that stands on top of the core, as a library of its own.
function(muster_addon NAME)
  muster_library(${NAME} ROOMS ${NAME} ${ARGN})
  target_link_libraries(muster_${NAME} PUBLIC muster_core)
endfunction()
