#!/bin/bash
# Several runs on one node: sbatch --gres=gpu:3 slurm/experiments.sh a.yaml b.yaml c.yaml,d.yaml
#
# Each word gets a GPU as soon as one is free; a comma means "then". Each run is cached, trained and scored, as far as
# that is not done. Ends with the worst exit code, or with 75 if a run is unfinished: then all go on in the next turn.
#
#SBATCH --job-name=lookonce-experiments
#SBATCH --nodes=1 --ntasks=1
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=32        # shared by the runs
#SBATCH --mem=256G
#SBATCH --time=8:00:00
#SBATCH --signal=B:USR1@300       # all runs are told
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=logs/%x-%j.out
set -euo pipefail
# shellcheck source=slurm/environment.sh
. "${LOOKONCE_SLURM:-$SLURM_SUBMIT_DIR/slurm}/environment.sh"
# shellcheck source=slurm/patience.sh
. "$LOOKONCE_SLURM/patience.sh"

: "${1:?usage: sbatch --gres=gpu:2 slurm/experiments.sh a.yaml b.yaml,then.yaml}"
IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES:-0}"
export OMP_NUM_THREADS=$(((${SLURM_CPUS_PER_TASK:-1} + ${#gpus[@]} - 1) / ${#gpus[@]}))
work=$(mktemp -d) # who has taken which word, and how each run has ended
trap 'rm -rf "$work"' EXIT

experiment() { # a whole run, with a log of its own
  local log start=$SECONDS
  log=logs/experiments-$SLURM_JOB_ID-$(basename "$1" .yaml).out
  echo "$(date '+%F %T') $1 on GPU $CUDA_VISIBLE_DEVICES, log in $log"
  run lookonce cache build "$1" >>"$log" 2>&1
  [ "$rc" -ne 0 ] || run lookonce train "$1" --resume >>"$log" 2>&1
  printf '%3d  %6d s  %s\n' "$rc" $((SECONDS - start)) "$1" >>"$work/ended"
}

lane() { # what one GPU does
  local number=0 chain
  children=()
  export CUDA_VISIBLE_DEVICES=$1
  trap 'tell USR1' USR1 && trap 'tell TERM' TERM # a subshell forgets them
  for word in "${@:2}"; do
    number=$((number + 1))
    mkdir "$work/$number" 2>/dev/null || continue # another GPU has it
    IFS=, read -ra chain <<<"$word"
    rc=0
    for run_file in "${chain[@]}"; do
      if [ "$rc" -eq 0 ]; then experiment "$run_file"; else echo "  -         -  $run_file" >>"$work/ended"; fi
    done
  done
}

for gpu in "${gpus[@]}"; do
  lane "$gpu" "$@" &
  children+=($!)
done
for child in "${children[@]}"; do wait_for "$child"; done

echo && echo "exit   seconds  run file (75: unfinished, -: not begun)" && sort -n "$work/ended"
rc=$(awk '{print $1}' "$work/ended" | sort -n | tail -n 1)
if grep -q '^ *75 ' "$work/ended"; then rc=75; fi
finish
