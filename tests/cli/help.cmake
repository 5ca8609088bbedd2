# The help of every subcommand has an example and fits 80 columns.
include(${CMAKE_CURRENT_LIST_DIR}/tool.cmake)

foreach(command "" run convert "convert idx" "convert npy" "convert npz" "convert csv" "convert h5" "convert zarr" inspect ls report checkpoint "checkpoint ls" "checkpoint verify"
        "checkpoint export" predict doctor init completion bench "bench allreduce" "bench step" "bench data" "bench checkpoint" "bench start" "bench recovery")
  string(REPLACE " " ";" words "${command}")
  muster(0 ${words} --help)
  expect_match("${out}" "Example:\n  muster ")
  expect_match("${out}" "Usage: muster[^\n]*${command}")
  expect_narrow("${out}")
endforeach()

muster(0 --version)
expect_match("${out}" "^muster [0-9]+\\.[0-9]+\\.[0-9]+\n$")
