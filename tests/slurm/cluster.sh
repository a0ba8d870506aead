#!/usr/bin/env bash
# A real, throw-away Slurm on loopback, for the tests: without systemd and without touching /etc.
#
#   cluster.sh start     write configs, start munged + slurmctld + N slurmd, wait until all nodes are idle
#   cluster.sh stop      stop the daemons that it started (by pidfiles); keeps logs
#   cluster.sh status    sinfo/squeue
#   cluster.sh clean     stop + delete the whole tree
#   eval "$(cluster.sh env)"   exports SLURM_CONF so that sbatch/squeue/scontrol find this cluster
#
# needs: apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge
# knobs: SLURM_CI_ROOT SLURM_CI_NODES SLURM_CI_CPUS SLURM_CI_MEM SLURM_CI_GPUS SLURM_CI_PORT SLURM_CI_PREFIX SLURM_CI_MAXARRAY
set -Eeuo pipefail

ROOT=${SLURM_CI_ROOT:-${TMPDIR:-/tmp}/slurm-ci}
NODES=${SLURM_CI_NODES:-2}           # number of slurmd's ("virtual nodes") on this host
CPUS=${SLURM_CI_CPUS:-64}            # CPUs that each node *claims* (config_overrides: may exceed the real count)
MEM=${SLURM_CI_MEM:-512000}          # MB that each node claims
GPUS=${SLURM_CI_GPUS:-2}             # fake GPUs per node; 0 = none
PORT=${SLURM_CI_PORT:-16817}         # slurmctld; slurmd i listens on PORT+i
PREFIX=${SLURM_CI_PREFIX:-127.0.1.}  # node names PREFIX1..N; loopback addresses resolve without /etc/hosts (MASTER_ADDR!)
MAXARRAY=${SLURM_CI_MAXARRAY:-1001}  # Slurm's default: highest index is MAXARRAY-1
WAIT=${SLURM_CI_WAIT:-30}

ME=$(id -un)
HOST=$(hostname -s 2>/dev/null || hostname)
export PATH=$PATH:/usr/sbin:/sbin
export SLURM_CONF=$ROOT/etc/slurm.conf

die() { echo "cluster: $*" >&2; exit 1; }
ours() {   # the pid of a pidfile, if it is still a Slurm or munge daemon (never kill a recycled pid)
  local p; [ -s "$1" ] && p=$(cat "$1") && grep -qE '^(slurmctld|slurmd|munged)$' "/proc/$p/comm" 2>/dev/null && echo "$p"
}
alive() { ours "$1" >/dev/null; }
pidfiles() { ls "$ROOT"/run/slurmctld.pid "$ROOT"/run/slurmd-*.pid "$ROOT"/run/munged.pid 2>/dev/null || true; }

write_conf() {
  local n last=$((PORT + NODES)) range=1
  [ "$NODES" -gt 1 ] && range="[1-$NODES]"
  local ports=$((PORT + 1)); [ "$NODES" -gt 1 ] && ports="[$ports-$last]"
  mkdir -p "$ROOT"/{etc,run,log,state,spool,munge}
  for n in $(seq "$NODES"); do mkdir -p "$ROOT/spool/$PREFIX$n"; done
  chmod 0755 "$ROOT" "$ROOT"/{etc,run,log,spool,munge}; chmod 0700 "$ROOT/state"
  # munge refuses a key that others may read, and an insecure socket folder
  if [ ! -s "$ROOT/munge/munge.key" ]; then
    (umask 077; head -c 1024 /dev/urandom > "$ROOT/munge/munge.key")
  fi
  chmod 0600 "$ROOT/munge/munge.key"

  local gres_types="" gres=""
  if [ "$GPUS" -gt 0 ]; then
    gres_types="GresTypes=gpu"; gres="Gres=gpu:$GPUS"
    # Fake GPUs. A count without File= leaves the node INVALID ("count reported lower than configured (0 < 2)");
    # File= wants one character device per GPU, numbered; symlinks to /dev/null pass stat() and need no mknod.
    local g; mkdir -p "$ROOT/dev"
    for g in $(seq 0 $((GPUS - 1))); do ln -sfn /dev/null "$ROOT/dev/nvidia$g"; done
    local devs="nvidia0"; [ "$GPUS" -gt 1 ] && devs="nvidia[0-$((GPUS - 1))]"
    echo "NodeName=$PREFIX$range Name=gpu File=$ROOT/dev/$devs" > "$ROOT/etc/gres.conf"
  else
    : > "$ROOT/etc/gres.conf"
  fi

  # slurmd always initialises a cgroup plugin, even with proctrack/linuxproc + task/none. Without a (systemd-managed)
  # cgroup v2 tree autodetect is fatal. 24.05+: "disabled". Before: force cgroup/v1, whose init touches nothing.
  local ver plugin=cgroup/v1; ver=$(slurmd -V | grep -oE '[0-9]+\.[0-9]+' | head -1)
  [ "$(printf '%s\n' 24.05 "$ver" | sort -V | head -1)" = 24.05 ] && plugin=disabled
  echo "CgroupPlugin=$plugin" > "$ROOT/etc/cgroup.conf"

  cat > "$ROOT/etc/slurm.conf" <<CONF
ClusterName=ci
SlurmctldHost=$HOST(127.0.0.1)
SlurmctldPort=$PORT
SlurmUser=$ME
SlurmdUser=$ME
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$ROOT/munge/munge.socket,cred_expire=5
StateSaveLocation=$ROOT/state
SlurmdSpoolDir=$ROOT/spool/%n
SlurmctldPidFile=$ROOT/run/slurmctld.pid
SlurmdPidFile=$ROOT/run/slurmd-%n.pid
SlurmctldLogFile=$ROOT/log/slurmctld.log
SlurmdLogFile=$ROOT/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$ROOT/log/jobcomp.log
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
MaxArraySize=$MAXARRAY
KillWait=20
MinJobAge=3600
SlurmdTimeout=30
SlurmctldTimeout=30
DefMemPerCPU=100
$gres_types
NodeName=$PREFIX$range NodeHostname=$HOST NodeAddr=127.0.0.1 Port=$ports CPUs=$CPUS RealMemory=$MEM $gres State=UNKNOWN
PartitionName=main   Nodes=ALL Default=YES MaxTime=1-00:00:00 State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL Default=NO  MaxTime=1-00:00:00 State=UP PriorityTier=10
CONF
}

fail() {   # print diagnostics and stop everything
  echo "cluster: $*" >&2
  tail -v -n 20 "$ROOT"/log/*.log >&2 || true
  sinfo -N -o '%N %T %E' >&2 2>/dev/null || true
  stop; exit 1
}

start() {
  local program; for program in slurmctld slurmd munged; do
    command -v "$program" >/dev/null || die "no $program: apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge"
  done
  getent hosts "$HOST" >/dev/null || echo "cluster: note: hostname '$HOST' does not resolve (works; munged warns)" >&2
  local f; for f in $(pidfiles); do alive "$f" && die "already running ($f); stop first"; done
  rm -rf "$ROOT"/{state,spool,run,log}      # clean state: job ids start at 1 again
  write_conf
  trap 'fail "line $LINENO failed"' ERR
  munged --key-file="$ROOT/munge/munge.key" --socket="$ROOT/munge/munge.socket" \
         --pid-file="$ROOT/run/munged.pid" --log-file="$ROOT/log/munged.log" \
         --seed-file="$ROOT/munge/munge.seed" --num-threads=4
  slurmctld -c
  local i; for i in $(seq "$NODES"); do slurmd -N "$PREFIX$i"; done
  local end=$((SECONDS + WAIT)) n
  trap - ERR
  while :; do
    n=$(sinfo -h -N -p main -t idle -o '%N' 2>/dev/null | wc -l)
    [ "$n" -eq "$NODES" ] && break
    [ $SECONDS -lt $end ] || fail "nodes not idle after ${WAIT}s"
    sleep 0.2
  done
  sinfo
}

stop() {
  local f p i
  # cancel all jobs first, so that no job step outlives the daemons
  if alive "$ROOT/run/slurmctld.pid"; then
    scancel -u "$ME" 2>/dev/null || true
    for i in $(seq 50); do [ -z "$(squeue -h -t R,CG 2>/dev/null)" ] && break; sleep 0.2; done
  fi
  # TERM slurmd and slurmctld together (each takes seconds), munged after them
  for f in "$ROOT"/run/slurmd-*.pid "$ROOT/run/slurmctld.pid"; do
    if p=$(ours "$f"); then kill "$p" 2>/dev/null || true; fi
  done
  for f in "$ROOT"/run/slurmd-*.pid "$ROOT/run/slurmctld.pid" "$ROOT/run/munged.pid"; do
    p=$(ours "$f") || { rm -f "$f"; continue; }
    [ "$f" != "$ROOT/run/munged.pid" ] || kill "$p" 2>/dev/null || true
    for i in $(seq 100); do kill -0 "$p" 2>/dev/null || break; sleep 0.1; done
    if kill -0 "$p" 2>/dev/null; then echo "cluster: pid $p ($f) did not exit, KILL" >&2; kill -9 "$p" || true; fi
    rm -f "$f"
  done
}

case "${1:-}" in
  start)   start ;;
  stop)    stop ;;
  restart) stop; start ;;
  status)  sinfo -N -l; squeue ;;
  clean)   stop; rm -rf "$ROOT" ;;
  env)     echo "export SLURM_CONF=$SLURM_CONF" ;;
  *)       sed -n '2,14p' "$0"; exit 2 ;;
esac
