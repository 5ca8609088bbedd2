# Converting: options reach the file, results are text or JSON on stdout.
include(${CMAKE_CURRENT_LIST_DIR}/tool.cmake)
set(lines "length,width,class\n")
foreach(i RANGE 1 100)
  math(EXPR class "${i} % 4")
  string(APPEND lines "${i}.5,0.${i},${class}\n")
endforeach()
file(WRITE "${FOLDER}/flowers.csv" "${lines}")

muster(0 convert csv flowers.csv out.h5)
expect_match("${out}" "wrote out.h5: 100 samples")
expect_match("${out}" "\nx +float32 +2 ")
expect_match("${out}" "\ny +int64 +- ")
expect_narrow("${out}")

muster(0 convert csv flowers.csv out.h5 --json --columns features,target --chunk 16 --compress 3)
expect_json("out.h5" files 0 path)
expect_json(100 files 0 samples)
expect_json("features" files 0 columns 0 name)
expect_json("target" files 0 columns 1 name)
expect_json(16 files 0 columns 1 chunk 0)
expect_json("shuffle, deflate 3" files 0 columns 1 compression)

muster(0 convert csv flowers.csv out.h5 --json --shuffle 7 --split train=0.8 test=0.2)
expect_json("out.train.h5" files 0 path)
expect_json(80 files 0 samples)
expect_json("out.test.h5" files 1 path)
expect_json(20 files 1 samples)

muster(0 convert csv flowers.csv out.h5 --json --per-class 3)
expect_json(12 files 0 samples)

# The header that pandas writes for unnamed columns.
file(WRITE "${FOLDER}/counted.csv" "0,1,2\n7,8,1\n9,9,0\n")
muster(0 convert csv counted.csv out.h5 --json --header yes)
expect_json(2 files 0 samples)
muster(0 convert csv counted.csv out.h5 --json --header no)
expect_json(3 files 0 samples)
muster(64 convert csv counted.csv out.h5 --header perhaps)
execute_process(COMMAND "${TOOL}" convert csv counted.csv out.h5 --json WORKING_DIRECTORY "${FOLDER}"
                OUTPUT_VARIABLE out ERROR_VARIABLE err)
expect_json(3 files 0 samples)
expect_match("${err}" "counts the columns and is taken as a sample")
