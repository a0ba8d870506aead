#!/bin/bash
# One rank of a training, started by srun: sets the variables that torchrun would set.
#
# srun and not torchrun, because torchrun dies of the signal that Slurm sends to a whole step, and exits with 1 when a
# rank exits with 75. srun exits with the highest exit code of all ranks.
set -euo pipefail
if [ "$SLURM_NTASKS" -gt 1 ]; then
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
fi
trap : USR1 TERM # the signal is also sent to the rank itself; this shell only waits for it
rc=0
"$@" || rc=$?
# The first task that fails makes srun kill the others (--kill-on-bad-exit), which are about to exit with 0.
[ "$rc" -ne 75 ] || sleep 3
exit "$rc"
