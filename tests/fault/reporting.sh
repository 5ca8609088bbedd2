# To be sourced, with $reporter set: starts reporter.cpp in $folder and checks each run.
folder=$(realpath "$(mktemp -d)")
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/storage"
saved=0 starts=0

# run COMMAND…: continues the run with the reporter, started by COMMAND; sets $code to its exit code and writes its output
# to $folder/output. Checks that the checkpoint from which it continues is intact and not older than the last saved one.
run() {
  code=0
  starts=$((starts + 1))
  {
    timeout -k 1 60 "$@" --storage "$folder/storage" --name run --progress none --timeout 30 --set start=$starts \
      > "$folder/output" 2>&1
  } 2> /dev/null || code=$?  # hides bash's own message about a killed process
  local from last
  from=$(sed -n 's/^from //p' "$folder/output")
  [ -z "$from" ] || [ "$from" -ge "$saved" ] || complain "$saved was saved, and it goes on from $from"
  last=$(sed -n 's/^saved \([0-9][0-9]*\)$/\1/p' "$folder/output" | tail -n 1)
  saved=${last:-$saved}
  [ $code != 124 ] || complain "it does not end"
  ! grep -q "damaged" "$folder/output" || [ -n "${may_be_damaged:-}" ] || complain "what is not whole was published"
}

complain() {
  cat "$folder/output"
  ls -lA "$folder/storage/run"
  echo "start $starts: $*"
  exit 1
}

# Continues the run undisturbed and checks that it saves, keeps KEEP checkpoints and leaves no hidden files.
check_undisturbed() {  # check_undisturbed KEEP COMMAND…
  local keep=$1 before=$saved
  shift
  run "$@" --keep "$keep"
  [ $code = 0 ] || complain "it ends with $code"
  [ "$saved" -gt "$before" ] || complain "it saves nothing"
  [ "$(find "$folder/storage/run" -maxdepth 1 -name 'checkpoint_*[0-9]' | wc -l)" -le "$keep" ] ||
    complain "more than $keep are left"
  [ -z "$(find "$folder/storage/run" -maxdepth 1 -name '.checkpoint_*')" ] || complain "something is left behind"
  [ ! -d "$folder/storage/fast" ] || [ -z "$(ls -A "$folder/storage/fast")" ] || complain "the fast tier is not empty"
}
