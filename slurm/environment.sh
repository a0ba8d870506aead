# shellcheck shell=bash
# The environment that submit.sh, study.sh and all jobs share, with the reason for each setting. Sourced, never run.

LOOKONCE_SLURM=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export LOOKONCE_SLURM # sbatch runs a copy of each script from another folder; the copy finds this one by the variable

# Site settings: modules, SBATCH_ACCOUNT, job options (see site.env.example). `module` fails under `set -u`.
set +u
# shellcheck source=/dev/null
if [ -f "$LOOKONCE_SLURM/site.env" ]; then . "$LOOKONCE_SLURM/site.env"; fi
set -u

if [ -n "${LOOKONCE_CONTAINER:-}" ]; then
  if [ ! -e "$LOOKONCE_CONTAINER" ]; then
    echo "no container at $LOOKONCE_CONTAINER (LOOKONCE_CONTAINER); build one: $LOOKONCE_SLURM/../containers/README.md" >&2
    exit 1
  fi
  LOOKONCE_CONTAINER=$(realpath "$LOOKONCE_CONTAINER") && export LOOKONCE_CONTAINER
  PATH=$LOOKONCE_SLURM/container:$PATH && export PATH # its `lookonce` runs the one in the container
else
  venv=${LOOKONCE_VENV:-$LOOKONCE_SLURM/../.venv} # made by `make setup`, unless the site has another one
  if [ -d "$venv/bin" ]; then PATH=$(cd "$venv/bin" && pwd):$PATH && export PATH; fi
  if ! command -v lookonce >/dev/null; then
    echo "no lookonce in $venv nor in PATH; run \`make setup\`, or set LOOKONCE_VENV in $LOOKONCE_SLURM/site.env" >&2
    exit 1
  fi
fi
if [ -n "${LOOKONCE_CONTAINER_RUN:-}" ]; then export LOOKONCE_CONTAINER_RUN; fi

# Compute nodes have no internet, and each request would wait minutes for its timeout. `lookonce fetch RUN.yaml`
# downloads everything to HF_HOME on the login node. Python reads this at import, so it is set here.
export HF_HUB_OFFLINE=1

# Packs differ in length; expandable segments avoid fragmentation of GPU memory.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}

# By default every process starts as many threads as it sees cores, and several processes on a node compete for them.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
  export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
  export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK # since Slurm 22.05, srun does not inherit it from sbatch
fi

# The tokenizers library warns and turns its threads off after a fork, as image decoding does.
export TOKENIZERS_PARALLELISM=false

# `sbatch --export=NONE` sets this variable, and srun would then start its tasks without PATH.
unset SLURM_EXPORT_ENV
