# How tests are declared. Every test has a label and a time limit; one with ranks says how many.

# MPI must neither mind root nor want a core per rank, and ranks must not be pinned onto one core. Tests run side by side,
# and would warn of each other; tests of binding unset MUSTER_BIND.
set(MUSTER_MPI_ENVIRONMENT
  OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
  OMPI_MCA_hwloc_base_binding_policy=none OMPI_MCA_mpi_yield_when_idle=1 OMP_NUM_THREADS=1 MUSTER_BIND=none)

# What is tested is optimised as ever. Programs of tests are compiled in less time: those of GoogleTest not optimised, since
# most of their code runs once; the others, which work for longer, with -O1.
set(muster_test_options -Wall -Wextra)
# g++ 12 warns wrongly about "text" + std::string (its bug 105329).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  list(APPEND muster_test_options -Wno-restrict)
endif()
set(muster_googletest_options ${muster_test_options} $<$<CONFIG:Release>:-O0>)

# muster_test_program(NAME LIBRARY SOURCES file… [LINKS target…] [GOOGLETEST]): LIBRARY is muster, the libraries that
# programs of users link, or muster_internals, for tests that use what muster does not export.
function(muster_test_program NAME LIBRARY)
  cmake_parse_arguments(PARSE_ARGV 2 test "GOOGLETEST" "" "SOURCES;LINKS")
  add_executable(${NAME} ${test_SOURCES})
  target_include_directories(${NAME} PRIVATE "${muster_root}/src" "${muster_root}/tests")
  target_link_libraries(${NAME} PRIVATE ${LIBRARY} ${test_LINKS})
  set_target_properties(${NAME} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests")
  set(headers programs)
  if(test_GOOGLETEST)
    target_compile_options(${NAME} PRIVATE ${muster_googletest_options})
    set(headers googletest)
  else()
    target_compile_options(${NAME} PRIVATE ${muster_test_options} $<$<CONFIG:Release>:-O1>)
  endif()
  if(TARGET muster_precompiled_${headers})  # tests/cross has none
    muster_precompile(${headers} ${NAME})
  endif()
endfunction()

# muster_unit_test(NAME SOURCES file… [LINKS target…] [TIMEOUT seconds]): GoogleTest in one process, without MPI.
function(muster_unit_test NAME)
  cmake_parse_arguments(PARSE_ARGV 1 test "" "TIMEOUT" "SOURCES;LINKS")
  if(NOT test_TIMEOUT)
    set(test_TIMEOUT 60)
  endif()
  muster_test_program(${NAME} muster_internals GOOGLETEST SOURCES ${test_SOURCES} LINKS muster_test_main ${test_LINKS})
  add_test(NAME unit.${NAME} COMMAND ${NAME})
  set_tests_properties(unit.${NAME} PROPERTIES LABELS unit TIMEOUT ${test_TIMEOUT} ENVIRONMENT OMP_NUM_THREADS=1)
endfunction()

# muster_optimise_test(NAME): optimises a test of GoogleTest that computes what has to come of millions of elements; it
# cannot use the precompiled headers of the others.
function(muster_optimise_test NAME)
  target_compile_options(${NAME} PRIVATE $<$<CONFIG:Release>:-O2>)
  set_target_properties(${NAME} PROPERTIES DISABLE_PRECOMPILE_HEADERS ON)
endfunction()

# muster_mpi_test(NAME SOURCES file… [RANKS n…] [SOAK_RANKS n…] [FILTER_4 filter] [LINKS target…] [TIMEOUT seconds]):
# GoogleTest under mpirun, once for each number of ranks: 1 and 3 unless RANKS says otherwise. The label soak runs 2 and
# 4 ranks as well, or SOAK_RANKS. FILTER_4 chooses the tests that make sense on 4 ranks. The program's main gives
# test::world().
function(muster_mpi_test NAME)
  cmake_parse_arguments(PARSE_ARGV 1 test "" "TIMEOUT;FILTER_4" "SOURCES;LINKS;RANKS;SOAK_RANKS")
  if(NOT test_TIMEOUT)
    set(test_TIMEOUT 120)
  endif()
  if(NOT test_RANKS)
    set(test_RANKS 1 3)
  endif()
  if(NOT test_SOAK_RANKS)
    set(test_SOAK_RANKS 2 4)
  endif()
  list(REMOVE_ITEM test_SOAK_RANKS ${test_RANKS})
  muster_test_program(${NAME} muster_internals GOOGLETEST SOURCES ${test_SOURCES}
    LINKS muster_mpi_test_main ${test_LINKS})
  foreach(label IN ITEMS mpi soak)
    set(ranks_of_label ${test_RANKS})
    if(label STREQUAL "soak")
      set(ranks_of_label ${test_SOAK_RANKS})
    endif()
    foreach(ranks IN LISTS ranks_of_label)
      set(filter "")
      if(ranks EQUAL 4 AND test_FILTER_4)
        set(filter FILTER ${test_FILTER_4})
      endif()
      _muster_add_mpi_test(${label}.${NAME}.${ranks} ${NAME} ${label} ${ranks} ${test_TIMEOUT} ${filter})
    endforeach()
  endforeach()
endfunction()

# _muster_add_mpi_test(TEST TARGET LABEL RANKS TIMEOUT [ENVIRONMENT variable…] [FILTER filter])
function(_muster_add_mpi_test TEST TARGET LABEL RANKS TIMEOUT)
  cmake_parse_arguments(PARSE_ARGV 5 test "" "FILTER" "ENVIRONMENT")
  set(command ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${RANKS} ${CMAKE_CROSSCOMPILING_EMULATOR}
      $<TARGET_FILE:${TARGET}>)
  if(test_FILTER)
    list(APPEND command --gtest_filter=${test_FILTER})
  endif()
  add_test(NAME ${TEST} COMMAND ${command})
  set_tests_properties(${TEST} PROPERTIES LABELS ${LABEL} TIMEOUT ${TIMEOUT} PROCESSORS ${RANKS}
    ENVIRONMENT "${MUSTER_MPI_ENVIRONMENT};${test_ENVIRONMENT}")
endfunction()

# muster_script_test(NAME LABEL COMMAND command… [PROCESSORS n] [TIMEOUT seconds]): a command that says "skipped: REASON"
# and ends with 77 where this machine cannot run it.
function(muster_script_test NAME LABEL)
  cmake_parse_arguments(PARSE_ARGV 2 test "" "PROCESSORS;TIMEOUT" "COMMAND")
  if(NOT test_TIMEOUT)
    set(test_TIMEOUT 120)
  endif()
  if(NOT test_PROCESSORS)
    set(test_PROCESSORS 1)
  endif()
  add_test(NAME ${LABEL}.${NAME} COMMAND ${test_COMMAND})
  set_tests_properties(${LABEL}.${NAME} PROPERTIES
    LABELS ${LABEL} TIMEOUT ${test_TIMEOUT} PROCESSORS ${test_PROCESSORS} SKIP_RETURN_CODE 77
    ENVIRONMENT "${MUSTER_MPI_ENVIRONMENT}")
endfunction()

# muster_fault_row(ROW.WORDS TEST target FILTER filter): names tests of a GoogleTest program that show a row of the fault
# matrix. The program runs with its own suite; fault.rows checks that the filter finds tests there.
function(muster_fault_row NAME)
  cmake_parse_arguments(PARSE_ARGV 1 row "" "TEST;FILTER" "")
  set_property(GLOBAL APPEND PROPERTY muster_fault_rows "${NAME} $<TARGET_FILE:${row_TEST}> ${row_FILTER}")
endfunction()
