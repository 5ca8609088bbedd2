# muster_kernels(ROOM NAME): adds NAME_portable.cpp to a room, on x86-64 NAME_avx2.cpp and NAME_avx512.cpp, and on aarch64
# NAME_neon.cpp if there is one: the same kernels once for each instruction set; which one runs is decided at run time.
# No contraction into fused multiply-adds, so that all of them give the same bits.
function(muster_kernels ROOM NAME)
  set(options -O3 -ffp-contract=off -fno-math-errno)
  target_sources(muster_room_${ROOM} PRIVATE ${NAME}_portable.cpp)
  set_source_files_properties(${NAME}_portable.cpp PROPERTIES COMPILE_OPTIONS "${options}" SKIP_PRECOMPILE_HEADERS ON)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    target_sources(muster_room_${ROOM} PRIVATE ${NAME}_avx2.cpp ${NAME}_avx512.cpp)
    target_compile_definitions(muster_room_${ROOM} PRIVATE MUSTER_X86_KERNELS)
    set_source_files_properties(${NAME}_avx2.cpp PROPERTIES
      COMPILE_OPTIONS "${options};-mavx2;-mf16c" SKIP_PRECOMPILE_HEADERS ON)
    set_source_files_properties(${NAME}_avx512.cpp PROPERTIES
      COMPILE_OPTIONS "${options};-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mf16c;-mprefer-vector-width=512"
      SKIP_PRECOMPILE_HEADERS ON)
  elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64" AND EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/${NAME}_neon.cpp")
    # Every aarch64 has NEON. The file converts half precision by intrinsics, which the compiler does not use by itself.
    target_sources(muster_room_${ROOM} PRIVATE ${NAME}_neon.cpp)
    target_compile_definitions(muster_room_${ROOM} PRIVATE MUSTER_NEON_KERNELS)
    set_source_files_properties(${NAME}_neon.cpp PROPERTIES COMPILE_OPTIONS "${options}" SKIP_PRECOMPILE_HEADERS ON)
  endif()
endfunction()
