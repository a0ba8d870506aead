"""Build a cache and train with submitit: python slurm/submitit_example.py run.yaml (pip install submitit)."""

import subprocess
import sys

import submitit

run_file, num_workers = sys.argv[1], 4
lookonce = [sys.executable, "-m", "lookonce"]
subprocess.run([*lookonce, "cache", "plan", run_file, "--write", "--pilot", "0"], check=True)

executor = submitit.AutoExecutor("logs")
executor.update_parameters(gpus_per_node=1, cpus_per_task=8, mem_gb=64, timeout_min=240, name="lookonce")
commands = [[*lookonce, "cache", "build", run_file, "--worker", f"{i}/{num_workers}"] for i in range(num_workers)]
workers = executor.map_array(subprocess.check_call, commands)
for worker in workers:
    worker.wait()  # not result(): the other tasks build the shards of a failed one
executor.submit(subprocess.check_call, [*lookonce, "train", run_file, "--resume"]).result()
subprocess.run([*lookonce, "status", run_file], check=True)
