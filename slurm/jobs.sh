# shellcheck shell=bash
# Submit jobs that wait for one another: all of them, or none. Sourced by submit.sh and study.sh, never run.
#
# No list of jobs is kept: the comment of a job, `mark`, says what it belongs to, and what is missing is asked again each
# time. The scripts that source this file set these three:
: "${mark:?}"   # the comment of their jobs
: "${again:?}"  # the command that submits what is missing
: "${follow:?}" # the command that shows how far all is

submitted=()
id=      # the job that was submitted last
missing= # what is missing, one a line

# refuse_queued WHAT [--force]: ends if jobs with the same mark are in the queue.
refuse_queued() {
  local queued
  queued=$(squeue -h -u "$(id -un)" -o '%k|%F' | awk -F '|' '$1 == mark {print $2}' mark="$mark" | sort -nu | xargs)
  if [ -n "$queued" ] && [ "${2:-}" != --force ]; then
    echo "jobs of $1 are still in the queue:" >&2
    squeue -h -j "${queued// /,}" -o '  %i %j: %T (%r)' >&2
    echo "follow them: $follow; cancel them: scancel $queued; submit anyway: --force" >&2
    exit 1
  fi
}

# find_missing RUN.yaml: sets `missing` to the phases that a run lacks. Images without a plan are hashed before, once for
# all tasks; LOOKONCE_PLAN_WITH="srun --time=30" does it on a compute node.
find_missing() {
  missing=$(lookonce status "$1" --missing)
  if grep -q '^plan' <<<"$missing"; then
    echo "the cache has no plan yet, or its plan lacks images; planning"
    ${LOOKONCE_PLAN_WITH:-} lookonce cache plan "$1" --write --pilot 0
    missing=$(lookonce status "$1" --missing)
  fi
}

undo() {
  [ ${#submitted[@]} -eq 0 ] || scancel "${submitted[@]}"
  echo "could not submit; nothing is left in the queue (cancelled: ${submitted[*]:-none})" >&2
  exit 1
}

# job KIND OPTIONS ARGUMENT...: submits a job; sets `id`.
job() {
  local options=LOOKONCE_${1^^}_OPTIONS given
  mkdir -p logs # Slurm does not create it, and without it a job fails silently
  read -ra given <<<"$2 ${!options:-}"
  id=$(sbatch --parsable --comment="$mark" "${given[@]}" "$LOOKONCE_SLURM/$1.sbatch" "${@:3}") || undo
  id=${id%%;*} # the name of a cluster may follow
  submitted+=("$id")
  printf '  %-8s  job %-6s  %s\n' "$1" "$id" "$2"
}

# after STATE ID...: prints the options of a job that waits until these jobs have this state (afterok, afterany).
after() {
  local IFS=:
  [ $# -lt 2 ] || echo "--dependency=$1:${*:2} --kill-on-invalid-dep=yes"
}

# build RUN.yaml NUM_SHARDS: submits the tasks that build a cache, and the job that checks it; sets `id` to that.
build() {
  local tasks=${LOOKONCE_TASKS:-4} ids=() num_tasks max offset size
  num_tasks=$((tasks < $2 ? tasks : $2))
  max=$(scontrol show config | awk '$1 == "MaxArraySize" {print $3}') # the highest index of an array is max - 1
  for ((offset = 0; offset < num_tasks; offset += max)); do
    size=$((num_tasks - offset < max ? num_tasks - offset : max))
    job cache "--array=0-$((size - 1))" "$1" "$num_tasks" "$offset"
    ids+=("$id")
  done
  # afterany and not afterok: a failed task does no harm if another task has built its shards.
  job finalize "$(after afterany "${ids[@]}")" "$1" "$again"
}
