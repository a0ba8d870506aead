#!/bin/bash
# Submit a whole run as a chain of jobs: slurm/submit.sh RUN.yaml [--force]
#
# Asks `lookonce status` what the run still lacks, prints it, and submits only that: cache array -> finalize -> train ->
# eval. After any failure, run the same command again. --force submits even if jobs of this run are still in the queue.
# LOOKONCE_TASKS: number of cache tasks (default 4), at most one per missing shard. More settings: site.env.example.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;; esac # the text above
# shellcheck source=slurm/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

run_file=${1:?usage: slurm/submit.sh RUN.yaml [--force]}
mark="lookonce $(realpath "$run_file")" # the comment that identifies the jobs of a run
queued=$(squeue -h -u "$(id -un)" -o '%k|%F' | awk -F '|' '$1 == mark {print $2}' mark="$mark" | sort -nu | xargs)
if [ -n "$queued" ] && [ "${2:-}" != --force ]; then
  echo "jobs of $run_file are still in the queue:" >&2
  squeue -h -j "${queued// /,}" -o '  %i %j: %T (%r)' >&2
  echo "follow them: lookonce status $run_file --watch 10; cancel them: scancel $queued; submit anyway: --force" >&2
  exit 1
fi

# Images are hashed here, once for all tasks. LOOKONCE_PLAN_WITH="srun --time=30" does it on a compute node.
missing=$(lookonce status "$run_file" --missing)
if grep -q '^plan' <<<"$missing"; then
  echo "the cache has no plan yet, or its plan lacks images; planning"
  ${LOOKONCE_PLAN_WITH:-} lookonce cache plan "$run_file" --write --pilot 0
  missing=$(lookonce status "$run_file" --missing)
fi
if [ -z "$missing" ]; then
  echo "nothing of $run_file is missing" && exit
fi
shown=$(sed -E 's/^cache (.+)/cache (\1 shards)/' <<<"$missing")
echo "missing: ${shown//$'\n'/, }"

mkdir -p logs # Slurm does not create it, and without it a job fails silently
submitted=()
undo() {
  [ ${#submitted[@]} -eq 0 ] || scancel "${submitted[@]}"
  echo "could not submit; nothing is left in the queue (cancelled: ${submitted[*]:-none})" >&2
  exit 1
}

# job KIND OPTIONS ARGUMENT...: submits a job; sets `id`, and `after` to the options of a job that needs its success.
job() {
  local options=LOOKONCE_${1^^}_OPTIONS given
  read -ra given <<<"$2 ${!options:-}"
  id=$(sbatch --parsable --comment="$mark" "${given[@]}" "$LOOKONCE_SLURM/$1.sbatch" "$run_file" "${@:3}") || undo
  id=${id%%;*} # the name of a cluster may follow
  submitted+=("$id")
  after="--dependency=afterok:$id --kill-on-invalid-dep=yes"
  printf '  %-8s  job %-6s  %s\n' "$1" "$id" "$2"
}

after=
num_shards=$(sed -n 's/^cache //p' <<<"$missing")
if [ -n "$num_shards" ]; then
  tasks=${LOOKONCE_TASKS:-4} ids=
  num_tasks=$((tasks < num_shards ? tasks : num_shards))
  max=$(scontrol show config | awk '$1 == "MaxArraySize" {print $3}') # the highest index of an array is max - 1
  for ((offset = 0; offset < num_tasks; offset += max)); do
    size=$((num_tasks - offset < max ? num_tasks - offset : max))
    job cache "--array=0-$((size - 1))" "$num_tasks" "$offset"
    ids=$ids:$id
  done
  # afterany and not afterok: a failed task does no harm if another task has built its shards.
  job finalize "--dependency=afterany$ids"
fi
for kind in train eval; do
  if grep -q "^$kind" <<<"$missing"; then job "$kind" "$after"; fi
done
echo "logs: logs/; follow: lookonce status $run_file --watch 10"
