# How tests are declared. Every test has a label and a time limit; one with ranks says how many.

# MPI must neither mind root nor want a core per rank, and ranks must not be pinned onto one core.
set(MUSTER_MPI_ENVIRONMENT
  OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
  OMPI_MCA_hwloc_base_binding_policy=none OMPI_MCA_mpi_yield_when_idle=1 OMP_NUM_THREADS=1)

function(_muster_test_target NAME MAIN)
  cmake_parse_arguments(PARSE_ARGV 2 test "" "" "SOURCES;LINKS")
  add_executable(${NAME} ${test_SOURCES})
  target_include_directories(${NAME} PRIVATE "${PROJECT_SOURCE_DIR}/src" "${PROJECT_SOURCE_DIR}/tests")
  # What is tested is optimised as ever; the tests themselves compile in three quarters of the time so.
  target_compile_options(${NAME} PRIVATE -Wall -Wextra $<$<CONFIG:Release>:-O1>)
  # g++ 12 warns wrongly about "text" + std::string (its bug 105329).
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    target_compile_options(${NAME} PRIVATE -Wno-restrict)
  endif()
  target_link_libraries(${NAME} PRIVATE muster ${MAIN} ${test_LINKS})
  set_target_properties(${NAME} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests")
endfunction()

# muster_unit_test(NAME SOURCES file… [LINKS target…] [TIMEOUT seconds]): GoogleTest in one process, without MPI.
function(muster_unit_test NAME)
  cmake_parse_arguments(PARSE_ARGV 1 test "" "TIMEOUT" "SOURCES;LINKS")
  if(NOT test_TIMEOUT)
    set(test_TIMEOUT 60)
  endif()
  _muster_test_target(${NAME} muster_test_main SOURCES ${test_SOURCES} LINKS ${test_LINKS})
  add_test(NAME unit.${NAME} COMMAND ${NAME})
  set_tests_properties(unit.${NAME} PROPERTIES LABELS unit TIMEOUT ${test_TIMEOUT} ENVIRONMENT OMP_NUM_THREADS=1)
endfunction()

# muster_mpi_test(NAME SOURCES file… RANKS n… [LINKS target…] [TIMEOUT seconds]): GoogleTest under mpirun, once for each
# number of ranks. The program's main gives test::world().
function(muster_mpi_test NAME)
  cmake_parse_arguments(PARSE_ARGV 1 test "" "TIMEOUT" "SOURCES;LINKS;RANKS")
  if(NOT test_TIMEOUT)
    set(test_TIMEOUT 120)
  endif()
  _muster_test_target(${NAME} muster_mpi_test_main SOURCES ${test_SOURCES} LINKS ${test_LINKS})
  foreach(ranks IN LISTS test_RANKS)
    add_test(NAME mpi.${NAME}.${ranks} COMMAND ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${ranks} $<TARGET_FILE:${NAME}>)
    set_tests_properties(mpi.${NAME}.${ranks} PROPERTIES
      LABELS mpi TIMEOUT ${test_TIMEOUT} PROCESSORS ${ranks} ENVIRONMENT "${MUSTER_MPI_ENVIRONMENT}")
  endforeach()
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

# muster_fault_test(ROW.WORDS TEST target FILTER filter [RANKS n…] [TIMEOUT seconds]): those tests of a GoogleTest program
# that show a row of the fault matrix.
function(muster_fault_test NAME)
  cmake_parse_arguments(PARSE_ARGV 1 test "" "TEST;FILTER;TIMEOUT" "RANKS")
  if(NOT test_TIMEOUT)
    set(test_TIMEOUT 120)
  endif()
  set(command $<TARGET_FILE:${test_TEST}> --gtest_filter=${test_FILTER})
  if(NOT test_RANKS)
    muster_script_test(${NAME} fault COMMAND ${command} TIMEOUT ${test_TIMEOUT})
  endif()
  foreach(ranks IN LISTS test_RANKS)
    muster_script_test(${NAME}.${ranks} fault PROCESSORS ${ranks} TIMEOUT ${test_TIMEOUT}
      COMMAND ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${ranks} ${command})
  endforeach()
endfunction()
