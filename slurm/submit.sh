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
mark="lookonce $(realpath "$run_file")"
printf -v again '%q %q' "$LOOKONCE_SLURM/submit.sh" "$run_file"
printf -v follow 'watch -x -n 10 lookonce status %q' "$run_file"
# shellcheck source=slurm/jobs.sh
. "$LOOKONCE_SLURM/jobs.sh"

refuse_queued "$run_file" "${2:-}"
find_missing "$run_file"
if [ -z "$missing" ]; then
  echo "nothing of $run_file is missing" && exit
fi
shown=$(sed -E 's/^cache (.+)/cache (\1 shards)/' <<<"$missing")
echo "missing: ${shown//$'\n'/, }"

num_shards=$(sed -n 's/^cache //p' <<<"$missing")
if [ -n "$num_shards" ]; then build "$run_file" "$num_shards"; fi
for kind in train eval; do
  if grep -q "^$kind" <<<"$missing"; then job "$kind" "$(after afterok ${id:+"$id"})" "$run_file"; fi
done
echo "logs: logs/; follow: $follow"
