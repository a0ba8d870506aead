# shellcheck shell=bash
# What all jobs and submit.sh set, each with its reason, in one place. Sourced, never run.
# TF32 is no variable but a key of the run file: train.tf32.

LOOKONCE_SLURM=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export LOOKONCE_SLURM # sbatch runs a copy of a script from elsewhere, which finds this folder by it

# What a site adds: modules, SBATCH_ACCOUNT, options of jobs (site.env.example). Modules trip over `set -u`.
set +u
# shellcheck source=/dev/null
if [ -f "$LOOKONCE_SLURM/site.env" ]; then . "$LOOKONCE_SLURM/site.env"; fi
set -u

venv=${LOOKONCE_VENV:-$LOOKONCE_SLURM/../.venv} # what `make setup` made, unless the site has another
if [ -d "$venv/bin" ]; then PATH=$(cd "$venv/bin" && pwd):$PATH && export PATH; fi
if ! command -v lookonce >/dev/null; then
  echo "no lookonce in $venv nor in PATH; make it with \`make setup\`, or name its venv in $LOOKONCE_SLURM/site.env" >&2
  exit 1
fi

# The compute nodes have no internet, and asking for it costs minutes of timeouts. `lookonce fetch RUN.yaml` brings
# everything to HF_HOME on the login node. Read when Python imports, so it is set here.
export HF_HUB_OFFLINE=1

# Packs differ in length: memory that can grow does not fall to pieces between them.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}

# By default every process takes all cores it sees, and several on a node stand in each other's way.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
  export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
  export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # srun does not take them over from sbatch, since Slurm 22.05
fi

# Tokenizers' threads do not survive the processes that decode images; it would warn and give up.
export TOKENIZERS_PARALLELISM=false

# A training that is requeued, perhaps on another node, finds here what it has compiled. A shared folder.
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$PWD/.compiled}

# sbatch --export=NONE sets it, and srun would then give its tasks no PATH.
unset SLURM_EXPORT_ENV
