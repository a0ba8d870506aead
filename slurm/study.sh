#!/bin/bash
# Submit a whole study, with a job for each run: slurm/study.sh STUDY.yaml [--force]
#
# Asks `lookonce study jobs` what the study still lacks, prints it, and submits only that: cache array -> finalize once for
# all runs that share the images, a training for each run, after the runs that it needs, answers that are not given in
# training, and the report when all jobs have ended. Runs that wait for a failed one are cancelled. After any failure,
# run the same command again. --force submits even if jobs of this study are still in the queue.
# LOOKONCE_TASKS: number of tasks of each cache (default 4). More settings: site.env.example.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;; esac # the text above
# shellcheck source=slurm/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

study_file=${1:?usage: slurm/study.sh STUDY.yaml [--force]}
mark="lookonce $(realpath "$study_file")"
printf -v again '%q %q' "$LOOKONCE_SLURM/study.sh" "$study_file"
printf -v follow 'watch -x -n 10 lookonce study status %q' "$study_file"
# shellcheck source=slurm/jobs.sh
. "$LOOKONCE_SLURM/jobs.sh"

refuse_queued "$study_file" "${2:-}"
missing=$(lookonce study jobs "$study_file")
if [ -z "$missing" ]; then
  echo "nothing of $study_file is missing" && exit
fi
echo "missing: $(cut -f 1 <<<"$missing" | sort | uniq -c | awk '{print $1, $2}' | paste -sd , | sed 's/,/, /g')"

mapfile -t jobs <<<"$missing"
declare -A num_shards=() ids=() # by the name of a job
for line in "${jobs[@]}"; do    # before anything is submitted, since hashing takes long
  IFS=$'\t' read -r kind name file _ <<<"$line"
  [ "$kind" = cache ] || continue
  find_missing "$file"
  num_shards[$name]=$(sed -n 's/^cache //p' <<<"$missing")
done

for line in "${jobs[@]}"; do
  IFS=$'\t' read -r kind name file waits options <<<"$line"
  IFS=, read -ra names <<<"$waits"
  read -ra words <<<"$options"
  before=() id=
  for other in "${names[@]}"; do before+=(${ids[$other]:+"${ids[$other]}"}); done
  named="--job-name=lookonce-$kind-$name $(after afterok "${before[@]}")"
  case $kind in
    cache) [ -z "${num_shards[$name]}" ] || build "$file" "${num_shards[$name]}" ;;
    train) job train "$named" "$file" ;;
    eval) job eval "$named" "$file" "${words[@]}" ;;
    report) job report "$(after afterany "${before[@]}")" "$file" ;; # of what is complete
  esac
  ids[$name]=$id
done
echo "logs: logs/; follow: $follow"
