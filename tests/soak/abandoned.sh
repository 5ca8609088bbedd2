# Sourced by other scripts. Lists names in /dev/shm that no process uses any more. Programs that run at the same time
# hold a lock on their names.
abandoned() {
  local name
  for name in $(find /dev/shm -maxdepth 1 -user "$(id -u)" -name 'muster.*' | sort); do
    ! { flock -n -x 9; } 9< "$name" || echo "$name"
  done 2> /dev/null
}

# left_behind BEFORE: lists the abandoned names that are not in BEFORE. It looks twice, because a name that is just
# being created has its lock only the second time.
left_behind() {
  comm -13 <(echo "$1") <(comm -12 <(abandoned) <(abandoned))
}
