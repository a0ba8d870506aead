# shellcheck shell=bash
# Run a command so that Slurm's signals reach it, and requeue the job if it is not done. Sourced by the jobs.
#
# Before the time limit Slurm signals the batch shell only (--signal=B:USR1@...); a preemption sends TERM to every
# process. Bash runs a trap only after the foreground command has ended, so commands run in the background and the shell
# waits for them. Exit code 75 of lookonce means: not done, progress saved, run the same command again.

child=  # the process to forward signals to
signal= # the last signal received
num_signals=0
forward() {
  signal=$1 num_signals=$((num_signals + 1))
  echo "$(date '+%F %T') $1: stopping, to resume later" >&2
  [ -z "$child" ] || kill -s "$1" "$child" 2>/dev/null || true
}
trap 'forward USR1' USR1
trap 'forward TERM' TERM

# run COMMAND...: sets `rc` to its exit code, or to 75 if a signal ended it before it had installed its handlers.
run() {
  local num_before
  rc=75
  [ -z "$signal" ] || return 0
  "$@" &
  child=$!
  [ -z "$signal" ] || kill -s "$signal" "$child" 2>/dev/null || true # it arrived just before the line above
  while :; do
    num_before=$num_signals rc=0
    wait "$child" || rc=$?
    # A code above 128 may mean that a signal interrupted `wait`, not that the command has ended.
    if [ "$rc" -le 128 ] || [ "$num_signals" -eq "$num_before" ]; then break; fi
  done
  child=
  if [ "$rc" -gt 128 ] && [ -n "$signal" ]; then rc=75; fi
}

# finish: ends the job with `rc`, and requeues it first if that is 75. The exit code stays 75, so where requeueing is
# forbidden the job counts as failed and submit.sh submits it again.
finish() {
  # Never plain SLURM_JOB_ID in an array: in its last task that is the id of the whole array, and requeues all tasks.
  local self=$SLURM_JOB_ID
  [ -z "${SLURM_ARRAY_TASK_ID:-}" ] || self=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
  # Not after TERM: a preempted job is requeued by Slurm itself, and one ended by scancel must stay cancelled.
  local restarts=${SLURM_RESTART_COUNT:-0}
  if [ "$rc" -eq 75 ] && [ "$signal" != TERM ] && [ "$restarts" -lt "${LOOKONCE_MAX_REQUEUES:-50}" ]; then
    scontrol requeue "$self" || true
  fi
  exit "$rc"
}
