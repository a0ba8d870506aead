#!/bin/bash
# Several runs on one node: sbatch --gres=gpu:3 slurm/experiments.sh a.yaml b.yaml c.yaml,d.yaml
#
# Each argument gets a GPU as soon as one is free; a comma means "then". Of each run, what is missing is done: cache,
# training, scores. Exits with the worst exit code, or with 75 if a run is unfinished; the job is then requeued.
#
#SBATCH --job-name=lookonce-experiments
#SBATCH --nodes=1 --ntasks=1
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=32        # shared by the runs
#SBATCH --mem=256G
#SBATCH --time=8:00:00
#SBATCH --signal=B:USR1@300       # forwarded to all runs
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=logs/%x-%j.out
set -euo pipefail
# shellcheck source=slurm/environment.sh
. "${LOOKONCE_SLURM:-$SLURM_SUBMIT_DIR/slurm}/environment.sh"
# shellcheck source=slurm/signals.sh
. "$LOOKONCE_SLURM/signals.sh"

: "${1:?usage: sbatch --gres=gpu:2 slurm/experiments.sh a.yaml b.yaml,then.yaml}"
IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES:-0}"
export OMP_NUM_THREADS=$(((${SLURM_CPUS_PER_TASK:-1} + ${#gpus[@]} - 1) / ${#gpus[@]}))
work=$(mktemp -d) # which GPU has taken which argument, and how each run has ended
trap 'rm -rf "$work"' EXIT

experiment() { # one whole run, with its own log
  local log start=$SECONDS
  log=logs/experiments-$SLURM_JOB_ID-$(basename "$1" .yaml).out
  echo "$(date '+%F %T') $1 on GPU $CUDA_VISIBLE_DEVICES, log: $log"
  run lookonce cache build "$1" >>"$log" 2>&1
  [ "$rc" -ne 0 ] || run lookonce train "$1" --resume >>"$log" 2>&1
  printf '%3d  %6d s  %s\n' "$rc" $((SECONDS - start)) "$1" >>"$work/ended"
}

lane() { # what one GPU does
  local number=0 chain
  children=()
  export CUDA_VISIBLE_DEVICES=$1
  trap 'forward USR1' USR1 && trap 'forward TERM' TERM # a subshell does not inherit traps
  for argument in "${@:2}"; do
    number=$((number + 1))
    mkdir "$work/$number" 2>/dev/null || continue # another GPU has taken it
    IFS=, read -ra chain <<<"$argument"
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

echo && echo "exit   seconds  run file (75: unfinished, -: not started)" && sort -n "$work/ended"
rc=$(awk '{print $1}' "$work/ended" | sort -n | tail -n 1)
if grep -q '^ *75 ' "$work/ended"; then rc=75; fi
finish
