# Benchmarks: the command line, and the rows of the smallest case. The figures are not checked.
include(${CMAKE_CURRENT_LIST_DIR}/tool.cmake)

muster(0 bench --help)
foreach(name allreduce step data start recovery)
  expect_match("${out}" "\n  ${name} ")
endforeach()
if(out MATCHES "\n  job ")
  message(SEND_ERROR "the help shows what is not meant for people:\n${out}")
endif()

muster(64 bench)
muster(64 bench allreduce --case "5 KB")
expect_match("${err}" "no case \"5 KB\".*\"4 KB\", \"64 KB\", \"1 MB\", \"25 MB\", \"100 MB\"")
muster(64 bench allreduce -n 0)
muster(64 bench allreduce --rounds many)

# bench_rows(ARGS…): accepts exit code 75 as well as 0, since a machine that runs tests is not quiet.
macro(bench_rows)
  execute_process(COMMAND ${LAUNCHER} "${TOOL}" bench ${ARGN} WORKING_DIRECTORY "${FOLDER}"
                  RESULT_VARIABLE result OUTPUT_VARIABLE out ERROR_VARIABLE err)
  if(NOT result MATCHES "^(0|75)$")
    message(SEND_ERROR "muster bench ${ARGN} ended with ${result}\n${out}${err}")
  endif()
endmacro()

# expect_row(VOID KEYS…): the first row has those keys, and the exit code fits it.
function(expect_row)
  foreach(key IN LISTS ARGN)
    string(REPLACE "/" ";" path "${key}")
    string(JSON value ERROR_VARIABLE problem GET "${out}" 0 ${path})
    if(problem OR value STREQUAL "")
      message(SEND_ERROR "no ${key} (${problem}) in:\n${out}")
    endif()
  endforeach()
  string(JSON void GET "${out}" 0 void)
  if((void AND NOT result EQUAL 75) OR (NOT void AND NOT result EQUAL 0))
    message(SEND_ERROR "it ended with ${result}, and void is ${void}")
  endif()
  if(void AND NOT err MATCHES "\nmuster: [^\n]*differ by more than 5 %[^\n]*\n$")
    message(SEND_ERROR "a void row was not said in one line: ${err}")
  endif()
  if(NOT err MATCHES ": [0-9]+ rounds\n" OR err MATCHES "\r")
    message(SEND_ERROR "it does not say in plain lines what it does: ${err}")
  endif()
endfunction()

set(keys median_ms/muster median_ms/muster_private median_ms/mpi median_ms/memcpy ratio/mpi ratio/memcpy
    interval/mpi/0 interval/mpi/1 aa)
bench_rows(allreduce --case "4 KB" --rounds 3 -n 2 --json)
expect_row(${keys})
expect_json("4 KB" 0 case)
expect_json(3 0 rounds)

# The hosts are mpirun's; they say how many ranks there are.
bench_rows(allreduce --case "4 KB" --rounds 3 --hosts localhost:3 --json)
expect_row(${keys})
muster(64 bench allreduce --hosts localhost:2 --with-peers)
expect_match("${err}" "these peers run on this host alone")

# An uneven number of ranks, and the table.
bench_rows(allreduce --case "4 KB" "64 KB" --rounds 2 -n 3)
expect_match("${out}" "^case +candidate +time +muster / it +95% interval\n4 KB +muster ")
expect_match("${out}" "\n64 KB +muster ")
expect_match("${out}" "\n +mpi +[0-9.]+ (m|µ)s +[0-9.]+ ")

# Under a launcher it uses the launcher's ranks.
set(LAUNCHER ${MPIEXEC} ${MPIEXEC_N} 2)
bench_rows(allreduce --case "4 KB" --rounds 2 --json)
string(JSON rows LENGTH "${out}")
if(NOT rows EQUAL 1)
  message(SEND_ERROR "each rank printed:\n${out}")
endif()
execute_process(COMMAND ${LAUNCHER} "${TOOL}" bench start RESULT_VARIABLE result OUTPUT_QUIET ERROR_VARIABLE err)
if(NOT result EQUAL 64 OR NOT err MATCHES "Start it without mpirun or srun")
  message(SEND_ERROR "start under a launcher ended with ${result}: ${err}")
endif()
set(LAUNCHER)

bench_rows(step --case "mlp batch 64" "own loop prepared" --rounds 2 -n 2 --json)
foreach(candidate muster mpi no_communication)
  string(JSON ms GET "${out}" 0 median_ms ${candidate})
endforeach()
foreach(candidate muster session mpi_each)
  string(JSON ms GET "${out}" 1 median_ms ${candidate})
endforeach()
expect_json(2 0 rounds)

# Peers that fail cost their own figures, and their cause is said.
file(MAKE_DIRECTORY "${FOLDER}/venv/bin")
file(WRITE "${FOLDER}/venv/bin/python3" [[#!/bin/sh
[ "$1" != -c ] || exit 0
printf '[rank0]: Traceback (most recent call last):\n[rank0]:   File "a.py", line 1\n' >&2
printf '[rank0]: ImportError: there is no numpy\n=======\n' >&2
exit 1
]])
file(CHMOD "${FOLDER}/venv/bin/python3" PERMISSIONS OWNER_READ OWNER_EXECUTE)
set(ENV{VIRTUAL_ENV} "${FOLDER}/venv")
bench_rows(start --rounds 2 -n 2 --with-peers --json)
unset(ENV{VIRTUAL_ENV})
file(REMOVE_RECURSE "${FOLDER}/venv")
expect_row(median_ms/muster median_ms/libtorch_load ratio/libtorch_load aa)
expect_json("first step" 0 case)
expect_json(2 0 rounds)
foreach(peer torchrun ray_train)
  expect_match("${err}" "\nmuster: warning: start first step: running ${peer}: [^\n]*: ImportError: there is no numpy\n")
  foreach(figure median_ms ratio)
    string(JSON type TYPE "${out}" 0 ${figure} ${peer})
    if(NOT type STREQUAL "NULL")
      message(SEND_ERROR "${figure} of ${peer}, which failed, is no null in:\n${out}")
    endif()
  endforeach()
endforeach()

# Without muster-bench beside it.
file(COPY "${TOOL}" DESTINATION "${FOLDER}/alone")
execute_process(COMMAND "${FOLDER}/alone/muster" bench step RESULT_VARIABLE result OUTPUT_QUIET ERROR_VARIABLE err)
if(NOT result EQUAL 69 OR NOT err MATCHES "^muster: starting [^\n]*/alone/muster-bench: [^\n]*muster_bench_tool[^\n]*\n$")
  message(SEND_ERROR "without muster-bench it ended with ${result}: ${err}")
endif()
file(REMOVE_RECURSE "${FOLDER}/alone")

# A dataset file: contiguous columns beside preads, encoded ones beside plain decoding.
string(REPEAT "1.5,2,3\n" 600 lines)
file(WRITE "${FOLDER}/a.csv" "${lines}")
muster(0 convert csv a.csv a.h5)
muster(0 convert h5 a.h5 packed.h5 --compress 1 --chunk 100)
foreach(file IN ITEMS a packed)
  set(plain_of_a raw_pread)
  set(plain_of_packed read_and_decode)
  set(plain ${plain_of_${file}})
  bench_rows(data ${file}.h5 --batch 64 --rounds 2 --case shuffled --json)
  expect_row(median_ms/muster median_ms/${plain} ratio/${plain} interval/${plain}/0 interval/${plain}/1 aa
             pass/samples_per_s pass/samples_per_s_range/0 pass/samples_per_s_range/1 pass/bytes_per_s pass/first_batch_ms
             pass/waiting)
  expect_json("shuffled" 0 case)
  expect_json(2 0 rounds)
  expect_json(600 0 pass samples)
  expect_json(64 0 pass batch)
endforeach()
bench_rows(data a.h5:/ --rounds 2)
expect_match("${out}" "\nshuffled +muster .*\n +raw_pread +[0-9.]+ (m|µ)s.*\nsequential +muster ")
expect_match("${out}" "\n- shuffled: [0-9]+ samples/s \\([0-9]+ – [0-9]+\\)")
expect_narrow("${out}")
muster(65 bench data none.h5)
expect_match("${err}" "none.h5: No such file")
muster(65 bench data a.csv)
muster(64 bench data)
muster(64 bench data a.h5 --batch 0)
muster(64 bench data a.h5 --batch many)
muster(64 bench data a.h5 --rounds 0)
muster(64 bench data a.h5 --case "block shuffle")
execute_process(COMMAND ${MPIEXEC} ${MPIEXEC_N} 2 "${TOOL}" bench data a.h5 WORKING_DIRECTORY "${FOLDER}"
                RESULT_VARIABLE result OUTPUT_QUIET ERROR_VARIABLE err)
if(NOT result EQUAL 64 OR NOT err MATCHES "has started 2 ranks, and one rank reads. Run it without the launcher")
  message(SEND_ERROR "data under a launcher ended with ${result}: ${err}")
endif()

# Ctrl-C while it measures: the rounds so far are printed, and nothing is left of its runs.
set(ENV{TMPDIR} "${FOLDER}/temporary")
file(MAKE_DIRECTORY "${FOLDER}/temporary")
execute_process(COMMAND bash -c [[
  set -u
  "$0" bench data packed.h5 --case shuffled --rounds 100000 --progress --json > rows.json 2> progress &
  until grep -qs "round 5 " progress || ! kill -0 $!; do sleep 0.1; done
  kill -INT $!
  wait $!]] "${TOOL}" WORKING_DIRECTORY "${FOLDER}" RESULT_VARIABLE result)
file(GLOB left "${FOLDER}/temporary/muster-bench-*")
if(NOT result EQUAL 130 OR left)
  message(SEND_ERROR "stopped by Ctrl-C, data ended with ${result} and left: ${left}")
endif()
file(READ "${FOLDER}/rows.json" out)
expect_json("shuffled" 0 case)
string(JSON rounds GET "${out}" 0 rounds)
if(rounds LESS 4)
  message(SEND_ERROR "stopped after four rounds, it has printed ${rounds}")
endif()
file(READ "${FOLDER}/progress" err)
expect_match("${err}" "muster: stopped by a signal; what was known is printed\n$")
unset(ENV{TMPDIR})
file(REMOVE_RECURSE "${FOLDER}/temporary")
file(REMOVE "${FOLDER}/rows.json" "${FOLDER}/progress" "${FOLDER}/a.csv" "${FOLDER}/a.h5" "${FOLDER}/packed.h5")

file(GLOB left RELATIVE "${FOLDER}" "${FOLDER}/*")
if(left)
  message(SEND_ERROR "benchmarks left files: ${left}")
endif()

# When it is stopped, it prints what it has measured so far as valid JSON.
execute_process(COMMAND bash -c [[
  set -u
  "$0" bench allreduce --case "4 KB" "100 MB" --rounds 2 --json > rows.json 2> /dev/null &
  until grep -q '"void"' rows.json || ! kill -0 $!; do sleep 0.1; done
  kill -INT $!
  wait $!]] "${TOOL}" WORKING_DIRECTORY "${FOLDER}" RESULT_VARIABLE result)
file(READ "${FOLDER}/rows.json" out)
file(REMOVE "${FOLDER}/rows.json")
if(NOT result EQUAL 130)
  message(SEND_ERROR "stopped by Ctrl-C it ended with ${result}")
endif()
expect_json("4 KB" 0 case)
