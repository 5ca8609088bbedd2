# Sourced by other scripts, before they do anything else. Lists names in /dev/shm that no process uses any more. Programs
# that run at the same time hold a lock on their names.
if [ -z "${MUSTER_TEST_MOUNTS:-}" ]; then
  # A test that runs beside this one may kill ranks, which leaves their names. So this script gets a /dev/shm of its own,
  # where it may mount one.
  root=$([ "$(id -u)" = 0 ] || echo --map-root-user)
  export MUSTER_TEST_MOUNTS=yes
  if unshare $root --mount mount -t tmpfs muster /dev/shm 2> /dev/null; then
    exec unshare $root --mount sh -c 'mount -t tmpfs muster /dev/shm && exec "$0" "$@"' "$0" "$@"
  fi
fi

abandoned() {
  local name
  for name in $(find /dev/shm -maxdepth 1 -user "$(id -u)" -name 'muster.*' | sort); do
    ! { flock -n -x 9; } 9< "$name" || echo "$name"
  done 2> /dev/null
}

# left_behind BEFORE: lists the abandoned names that are not in BEFORE. It looks twice, one after the other, because a
# name that is just being created has its lock only the second time.
left_behind() {
  local first
  first=$(abandoned)
  comm -13 <(echo "$1") <(comm -12 <(echo "$first") <(abandoned))
}
