# Makes the comment at the beginning of a header its documentation; indented lines are code.
FILENAME ~ /\.md$/ { print; next }
NR == 1 && /^\/\// { print "/// \\file"; print "///"; first = 1 }
first && !/^\/\// { first = 0 }
first {
  sub(/^\/\/ ?/, "")
  if ($0 ~ /^  /) {
    if (!code) print "/// \\code{.cpp}"
    code = 1
    print "/// " $0
  } else {
    if (code) print "/// \\endcode"
    code = 0
    print "/// " $0
  }
  next
}
code { print "/// \\endcode"; code = 0 }
{ print }
