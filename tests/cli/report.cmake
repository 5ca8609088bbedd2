# Pages about runs and sweeps: what they hold, and what is refused. report/compare.py checks values at random.
include(${CMAKE_CURRENT_LIST_DIR}/tool.cmake)

# data(FILE): sets `out` to the JSON in the page.
macro(data file)
  file(READ "${FOLDER}/${file}" page)
  if(NOT page MATCHES "<script type=\"application/json\" id=\"data\">([^<]*)</script>")
    message(FATAL_ERROR "${file} has no data")
  endif()
  set(out "${CMAKE_MATCH_1}")
endmacro()

set(odd "<img src=x onerror=alert(1)></script><!--")
file(WRITE "${FOLDER}/runs/demo/params.json" "{\"lr\": 0.5, \"note\": \"${odd}\"}")
file(WRITE "${FOLDER}/runs/demo/result.json"
  "{\"training_iteration\": 1, \"global_step\": 10, \"time_total_s\": 1.5, \"timestamp\": 100, \"world_size\": 2, "
  "\"loss\": 0.125, \"${odd}\": 5, \"acc\": null, \"of_ranks\": [1, 2.5], \"text\": \"a\", \"checkpoint_dir_name\": \"checkpoint_000000\"}\n"
  "{\"training_iteration\": 2, \"global_step\": 20, \"time_total_s\": 2.5, \"timestamp\": 103, \"world_size\": 1, "
  "\"loss\": 0.30000000000000004, \"acc\": 0.25, \"memory_bytes\": {\"max\": 77, \"max_rank\": 1}, "
  "\"rank_times\": {\"save\": {\"min\": 1, \"median\": 2, \"max\": 3, \"max_rank\": 1}}, "
  "\"late_ranks\": [{\"rank\": 1, \"host\": \"n1\", \"cause\": \"shared cores\", \"behind\": 0.5}]}\n"
  "broken\n\n{\"training_iter")
file(WRITE "${FOLDER}/runs/demo/status.json" "{\"state\": \"failed\", \"starts\": [{\"started\": 100, \"ended\": 110, \
\"world_size\": 2, \"state\": \"died\", \"error\": \"${odd}\"}], \"time\": {\"training_s\": 5}}")
file(WRITE "${FOLDER}/runs/demo/error.txt" "the cause")
file(WRITE "${FOLDER}/runs/demo/trace_1_2.json" "{\"traceEvents\": [{\"name\": \"otherData\"}], \"otherData\": {\"ranks\": 2, \
\"spans\": [{\"name\": \"${odd}\", \"total_ms\": 1}, {\"name\": \"step\", \"total_ms\": 7}, 3], \"waited_for\": [{\"rank\": 1, \"ms\": 2}]}}")
file(WRITE "${FOLDER}/runs/demo/trace_broken.json" "{\"otherData\": {\"spans\":")
file(WRITE "${FOLDER}/runs/demo/trace_other.json" "{\"traceEvents\": []}")
file(WRITE "${FOLDER}/runs/empty/params.json" "{}")
file(WRITE "${FOLDER}/runs/plain/result.json" "{\"loss\": 3}\n{\"loss\": 1}\n{\"loss\": 2}")
file(WRITE "${FOLDER}/other/demo/result.json" "{\"loss\": 3}\n")

muster(0 report runs/demo)
expect_match("${out}" "^report.html: 1 run, [0-9.]+ KB\n$")
data(report.html)
if(page MATCHES "<img" OR page MATCHES "(src|href)=\"https?://[^d]" OR NOT page MATCHES "Dan Vanderkam")
  message(SEND_ERROR "the page is not safe, not alone, or without its licence")
endif()
expect_json("demo" runs 0 name)
expect_json("failed" runs 0 state)
expect_json(2 runs 0 reports)
expect_json(1 runs 0 damaged_lines)
expect_json("0.125" runs 0 metrics loss value 0)
expect_json("0.30000000000000004" runs 0 metrics loss last)
expect_json(10 runs 0 metrics loss step 0)
expect_json(10 runs 0 metrics loss step 1)  # a difference
expect_json(1000 runs 0 metrics loss ms 1)
expect_json("" runs 0 metrics acc value 0)  # null
expect_json(1 runs 0 metrics acc gaps)
expect_json("5.0" runs 0 metrics "${odd}" last)
expect_json("2.5" runs 0 metrics "of_ranks[1]" last)
expect_json("77.0" runs 0 own memory_bytes.max last)
expect_json("3.0" runs 0 split save max 0)
expect_json(1 runs 0 late 0 times)
expect_json("n1" runs 0 late 0 host)
expect_json(2 runs 0 worlds 0 world_size)
expect_json(1 runs 0 worlds 1 world_size)
expect_json("checkpoint_000000" runs 0 checkpoints 0 folder)
expect_json("deleted" runs 0 checkpoints 0 state)
expect_json("3.0" runs 0 checkpoints 0 save_s)
expect_json("died" runs 0 status starts 0 state)
expect_json("${odd}" runs 0 status starts 0 error)
expect_json("the cause" runs 0 error)
expect_json(1 runs 0 traces LENGTH)
expect_json("trace_1_2.json" runs 0 traces 0 file)
expect_json("step" runs 0 traces 0 spans 0 name)
expect_json("${odd}" runs 0 traces 0 spans 1 name)
expect_json(2 runs 0 traces 0 waited_for 0 ms)
expect_json("${odd}" runs 0 params note)

# Several runs; a page replaces a page. Names that are the same get their folders.
muster(0 report runs/demo other/demo runs/empty runs/plain/ runs/plain)
data(report.html)
expect_json("runs/demo" runs 0 name)
expect_json("other/demo" runs 1 name)
expect_json(0 runs 2 reports)
expect_json(3 runs 3 reports)
expect_json(1 runs 3 metrics loss report 2)

# A sweep.
file(WRITE "${FOLDER}/sweep/sweep.json" "{\"metric\": \"loss\", \"mode\": \"min\", \"trials\": [{\"trial\": \"trial_00000\", \
\"status\": \"done\", \"config\": {\"lr\": 0.1}, \"metrics\": {\"loss\": 2}, \"error\": null}, {\"trial\": \"trial_00001\", \
\"status\": \"waiting\", \"config\": {\"lr\": 0.25}, \"metrics\": null, \"error\": null}]}")
file(WRITE "${FOLDER}/sweep/trial_00000/result.json" "{\"loss\": 2}\n")
file(MAKE_DIRECTORY "${FOLDER}/sweep/trial_00001")
muster(0 report sweep -o sweep.html)
data(sweep.html)
expect_json("min" sweeps 0 mode)
expect_json("0.25" sweeps 0 trials 1 config lr)
expect_json("trial_00000" runs 0 name)
expect_json("2.0" runs 0 metrics loss last)
string(JSON length LENGTH "${out}" runs)
if(NOT length EQUAL 1)
  message(SEND_ERROR "a trial that has not begun is shown")
endif()

# What is refused.
muster(64 report)
muster(65 report nowhere)
expect_match("${err}" "no such folder")
muster(65 report runs)
expect_match("${err}" "neither a run nor a sweep")
file(WRITE "${FOLDER}/mine.html" "my page")
muster(64 report runs/demo -o mine.html)
expect_match("${err}" "there is a file that is not a report of muster")
file(READ "${FOLDER}/mine.html" mine)
muster(64 report runs/demo -o runs)
expect_match("${err}" "it is a folder")
muster(64 report runs/demo -o nowhere/a.html)
expect_match("${err}" "there is no folder nowhere")
muster(64 report runs/demo -o /dev/null)
expect_match("${err}" "it is no regular file")
file(MAKE_DIRECTORY "${FOLDER}/runs/odd/result.json")
file(WRITE "${FOLDER}/runs/odd/params.json" "{}")
muster(65 report runs/odd -o odd.html)
expect_match("${err}" "result.json: it is no regular file")
file(MAKE_DIRECTORY "${FOLDER}/runs/demo/checkpoint_000001" "${FOLDER}/runs/demo/logs")
muster(64 report runs/demo -o runs/demo/checkpoint_000001/report.html)
file(WRITE "${FOLDER}/runs/demo/.lock" "")
muster(64 report runs/demo -o runs/demo/a.html)
muster(0 report runs/demo -o runs/demo/report.html)
if(NOT mine STREQUAL "my page")
  message(SEND_ERROR "a file that is no report was replaced")
endif()

# Deeply nested JSON crashes nothing.
string(REPEAT "[" 140000 deep)
string(REPEAT "]" 140000 back)
file(WRITE "${FOLDER}/deep/params.json" "{\"seed\": 7, \"deep\": ${deep}${back}}")
file(WRITE "${FOLDER}/deep/result.json" "{\"loss\": 0.5, \"deep\": ${deep}${back}}\n{\"loss\": 1, \"deep\": [[[[[[[1]]]]]]]}\n")
muster(0 report deep -o deep.html)
data(deep.html)
expect_json("1.0" runs 0 metrics loss last)
