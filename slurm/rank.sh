#!/bin/bash
# One process of a training, started by srun: it is told what torchrun would tell it, and its signals reach it.
#
# torchrun dies of the signal that Slurm sends to a whole step, and ends with 1 when a process ends with 75. srun gives
# the highest exit code of all.
set -euo pipefail
if [ "$SLURM_NTASKS" -gt 1 ]; then
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
fi
trap : USR1 TERM # this shell waits for the process, which was sent the same signal
rc=0
"$@" || rc=$?
# the first that ends with an error lets srun kill the others, which are about to end with 0
[ "$rc" -ne 75 ] || sleep 3
exit "$rc"
