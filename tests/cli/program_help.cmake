# A program under muster::Launch prints its help, once however many ranks there are, and ends with 0.
include(${CMAKE_CURRENT_LIST_DIR}/tool.cmake)

foreach(launcher "" "${MPIEXEC};${MPIEXEC_N};2")
  execute_process(COMMAND ${launcher} "${TOOL}" --help WORKING_DIRECTORY "${FOLDER}"
                  RESULT_VARIABLE result OUTPUT_VARIABLE out ERROR_VARIABLE err)
  if(NOT result EQUAL 0)
    message(SEND_ERROR "${launcher} --help ended with ${result}\n${out}${err}")
  endif()
  expect_narrow("${out}")
  foreach(part "Usage: linear" "--storage" "MUSTER_SEED")
    string(REGEX MATCHALL "${part}[^-a-z_A-Z]" found "${out}")
    list(LENGTH found times)
    if(NOT times EQUAL 1)
      message(SEND_ERROR "${launcher} --help printed \"${part}\" ${times} times:\n${out}${err}")
    endif()
  endforeach()
endforeach()

file(GLOB left RELATIVE "${FOLDER}" "${FOLDER}/*")
if(left)
  message(SEND_ERROR "--help left files: ${left}")
endif()
