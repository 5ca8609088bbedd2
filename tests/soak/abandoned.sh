# Sourced. Names in /dev/shm that nobody holds any more; those of programs that run beside are locked by them.
abandoned() {
  local name
  for name in $(find /dev/shm -maxdepth 1 -user "$(id -u)" -name 'muster.*' | sort); do
    ! { flock -n -x 9; } 9< "$name" || echo "$name"
  done 2> /dev/null
}

# left_behind BEFORE: those that were not there before. One that is just being made is locked the second time.
left_behind() {
  comm -13 <(echo "$1") <(comm -12 <(abandoned) <(abandoned))
}
