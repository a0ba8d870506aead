#!/bin/bash
# Install Slurm's daemons and shellcheck for the tests, if they are missing: needs Debian or Ubuntu, and root.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
missing=()
for program in slurmctld slurmd munged sbatch shellcheck; do
  command -v "$program" >/dev/null || missing+=("$program")
done
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
  export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 # RUNLEVEL=1: start no daemon; the tests start their own
  apt-get update -qq
  exec apt-get install -qq -y --no-install-recommends slurmctld slurmd slurm-client munge shellcheck
fi
echo "************************************************************************" >&2
echo "NOT TESTED: slurm/. Missing: ${missing[*]}. Only root on Debian or Ubuntu can" >&2
echo "install them here:" >&2
echo "  apt-get install slurmctld slurmd slurm-client munge shellcheck" >&2
echo "************************************************************************" >&2
[ -z "${CI:-}" ]
