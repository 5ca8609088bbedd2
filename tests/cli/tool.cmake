# muster(CODE ARGS…): runs the tool in the test's folder, requires exit code CODE, and sets `out` and `err` to its output.
# With CODE 0, stderr must be empty, since it is no terminal here.
cmake_minimum_required(VERSION 3.22)
file(REMOVE_RECURSE "${FOLDER}")
file(MAKE_DIRECTORY "${FOLDER}")

macro(muster code)
  execute_process(COMMAND "${TOOL}" ${ARGN} WORKING_DIRECTORY "${FOLDER}"
                  RESULT_VARIABLE result OUTPUT_VARIABLE out ERROR_VARIABLE err)
  if(NOT result STREQUAL "${code}")
    message(SEND_ERROR "muster ${ARGN} ended with ${result}, not ${code}\n${out}${err}")
  endif()
  if("${code}" EQUAL 0 AND NOT err STREQUAL "")
    message(SEND_ERROR "muster ${ARGN} wrote to stderr: ${err}")
  endif()
  if(NOT "${code}" EQUAL 0 AND NOT err MATCHES "^muster: [^\n]*\n$")
    message(SEND_ERROR "muster ${ARGN} did not say what is wrong in one line: ${err}")
  endif()
endmacro()

function(expect_match text pattern)
  if(NOT text MATCHES "${pattern}")
    message(SEND_ERROR "no \"${pattern}\" in:\n${text}")
  endif()
endfunction()

# expect_json(VALUE PATH…): requires that value at that path of the JSON in `out`.
function(expect_json expected)
  string(JSON value ERROR_VARIABLE problem GET "${out}" ${ARGN})
  if(problem OR NOT value STREQUAL expected)
    message(SEND_ERROR "${ARGN} is \"${value}\", not \"${expected}\" (${problem}) in:\n${out}")
  endif()
endfunction()

# expect_narrow(TEXT): requires that no line has more than 80 columns.
function(expect_narrow text)
  string(REGEX REPLACE "[^\n -~]+" "." ascii "${text}")  # LENGTH counts bytes
  string(REGEX REPLACE "[];[]" "." ascii "${ascii}")  # in CMake these separate or join list elements
  string(REPLACE "\n" ";" lines "${ascii}")
  foreach(line IN LISTS lines)
    string(LENGTH "${line}" columns)
    if(columns GREATER 80)
      message(SEND_ERROR "wider than 80 columns: ${line}")
    endif()
  endforeach()
endfunction()
