# shellcheck shell=bash
# Running a command so that what Slurm says reaches it, and going on later. Sourced by the jobs.
#
# Slurm tells the shell alone (--signal=B:USR1@...), some time before the limit; a preemption tells all, with TERM. A
# trap waits for a command in the foreground, so commands run in the background and the shell waits. Exit code 75 is
# lookonce's "not done, run me again".

children=() # whom to tell
told=       # the last signal that came
num_told=0
tell() {
  told=$1 num_told=$((num_told + 1))
  echo "$(date '+%F %T') $1: stopping, to go on later" >&2
  [ ${#children[@]} -eq 0 ] || kill -s "$1" "${children[@]}" 2>/dev/null || true
}
trap 'tell USR1' USR1
trap 'tell TERM' TERM

# run COMMAND...: leaves its exit code in `rc`; 75 if a signal ended it before it could listen to signals.
run() {
  rc=75
  [ -z "$told" ] || return 0
  "$@" &
  children=($!)
  [ -z "$told" ] || kill -s "$told" "${children[@]}" 2>/dev/null || true # it came just now
  wait_for "${children[0]}"
  children=()
  if [ "$rc" -gt 128 ] && [ -n "$told" ]; then rc=75; fi
}

wait_for() {
  local heard
  while :; do
    heard=$num_told rc=0
    wait "$1" || rc=$?
    # above 128 it may be the signal that ended the waiting, and not the command
    if [ "$rc" -le 128 ] || [ "$num_told" -eq "$heard" ]; then return 0; fi
  done
}

# finish: ends the job with `rc`, and asks to be run again if it is 75. The exit code stays 75: where requeueing is
# forbidden the job has failed, and submit.sh goes on.
finish() {
  # never SLURM_JOB_ID in an array: in the last task it is the whole array's, and requeues all
  local self=$SLURM_JOB_ID
  [ -z "${SLURM_ARRAY_TASK_ID:-}" ] || self=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
  # TERM is a preemption, after which Slurm does so itself, or scancel, which would be undone
  if [ "$rc" -eq 75 ] && [ "$told" != TERM ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "${LOOKONCE_MAX_REQUEUES:-50}" ]; then
    scontrol requeue "$self" || true
  fi
  exit "$rc"
}
