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

# The type of a column.
muster(0 convert csv flowers.csv typed.h5 --json --type x=float64 y=float32)
expect_json("float64" files 0 columns 0 dtype)
expect_json("float32" files 0 columns 1 dtype)
muster(64 convert csv flowers.csv typed.h5 --type float64)
expect_match("${err}" "\"float64\" is not COLUMN=TYPE, as in y=float64")
muster(64 convert csv flowers.csv typed.h5 --type x=int8)
expect_match("${err}" "Give float32, float64 or int64")
muster(64 convert csv flowers.csv typed.h5 --type x=float64 --type x=float32)
expect_match("${err}" "the column x is given twice")
muster(65 convert csv flowers.csv typed.h5 --type x=int64)
expect_match("${err}" "line 2: field 1, \"1.5\", is not a whole number that int64 holds")

# A copy in another layout.
muster(0 convert csv flowers.csv packed.h5 --compress 3 --chunk 50)
muster(0 inspect packed.h5 --json)
expect_json("decoded" columns 0 reader)
expect_json("muster convert h5 packed.h5 OUT.h5" convert command)
muster(0 convert h5 packed.h5 plain.h5 --json)
expect_json("contiguous" files 0 columns 0 layout)
expect_json("direct" files 0 columns 0 reader)
muster(0 convert h5 packed.h5:/ part.h5 --columns y --chunk 20 --shuffle 1 --split train=0.8 test=0.2)
expect_match("${out}" "wrote part.train.h5: 80 samples.*\ny +int64 +-.* chunked +20 +directly +none\n\nwrote part.test.h5: 20 samples")
expect_narrow("${out}")
muster(64 convert h5 packed.h5 packed.h5)
expect_match("${err}" "one of the inputs")
muster(64 convert h5 packed.h5 plain.h5 out.h5)

# An archive: where libzip is missing, the message names its package.
file(WRITE "${FOLDER}/none.npz" "")
execute_process(COMMAND "${TOOL}" convert npz none.npz new.h5 WORKING_DIRECTORY "${FOLDER}"
                RESULT_VARIABLE result ERROR_VARIABLE err)
if(result EQUAL 69)
  expect_match("${err}" "built without libzip. Install it \\(libzip-dev on Debian\\)")
else()
  muster(65 convert npz none.npz new.h5)
  expect_match("${err}" "not a whole .npz archive")
  muster(64 convert npz none.npz none.npz new.h5)
  expect_match("${err}" "2 inputs are given, and one .npz archive is read")
endif()
if(EXISTS "${FOLDER}/new.h5")
  message(SEND_ERROR "a refused archive left a file")
endif()
muster(65 convert h5 flowers.csv out.h5)
muster(65 convert h5 packed.h5 out.h5 --columns z)
expect_match("${err}" "no dataset \"z\"")

# A signal ends the reading of a pipe before its end.
execute_process(COMMAND bash -c [[mkfifo pipe; "$0" convert csv pipe piped.h5 & tool=$!
                                  exec 3> pipe; kill -TERM $tool
                                  { yes 1,2 | head -c 5000000 >&3; } 2> /dev/null && exit 1
                                  exec 3>&-; wait $tool]] "${TOOL}"
                WORKING_DIRECTORY "${FOLDER}" RESULT_VARIABLE result ERROR_VARIABLE err)
if(NOT result EQUAL 143)
  message(SEND_ERROR "a conversion that reads a pipe ended with ${result}, not by the signal: ${err}")
endif()
expect_match("${err}" "stopped by a signal; nothing was written")

# A limit on the size of files is an error, and leaves nothing.
execute_process(COMMAND bash -c [[ulimit -f 1; exec "$0" convert csv flowers.csv limited.h5]] "${TOOL}"
                WORKING_DIRECTORY "${FOLDER}" RESULT_VARIABLE result ERROR_VARIABLE err)
if(NOT result EQUAL 75)
  message(SEND_ERROR "a conversion beyond the limit on files ended with ${result}: ${err}")
endif()
expect_match("${err}" "File too large")
file(GLOB left "${FOLDER}/piped*" "${FOLDER}/limited*")
if(left)
  message(SEND_ERROR "conversions that failed have left ${left}")
endif()
