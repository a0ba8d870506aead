#!/bin/bash
# Slurm's daemons for the tests, and shellcheck, if they are not here: needs Debian or Ubuntu, and root.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
lacking=()
for program in slurmctld slurmd munged sbatch shellcheck; do
  command -v "$program" >/dev/null || lacking+=("$program")
done
[ ${#lacking[@]} -gt 0 ] || exit 0
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
  export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 # RUNLEVEL: no daemon is started; the tests start their own
  apt-get update -qq
  exec apt-get install -qq -y --no-install-recommends slurmctld slurmd slurm-client munge shellcheck
fi
echo "************************************************************************" >&2
echo "NOT TESTED: slurm/. There is no ${lacking[*]} here, and this is not root on" >&2
echo "Debian or Ubuntu, so it can not be installed. Ask root for:" >&2
echo "  apt-get install slurmctld slurmd slurm-client munge shellcheck" >&2
echo "************************************************************************" >&2
[ -z "${CI:-}" ]
