"""The training loop: transformers' Trainer, set up from the run file.

session        what training and evaluation share: inputs, opened cache, collator, trainer
trainer        Trainer over whole optimizer steps
arguments      Trainer's settings from the run file
scheduler      check a learning rate schedule before anything is read or written
warmup         a trial of the longest pack: compilation, memory, CUDA graphs
evaluations    what is measured while training, and when
metrics_log    one line per logging step, and log.jsonl
curves_file    curves.svg beside the log
tracking       the trackers of `train.track`: TensorBoard, W&B and MLflow
checkpoints    checkpoints with checksums: whole, or not used
trainer_state  Trainer's own state in a checkpoint, read before Trainer reads it
heartbeat      progress.json while a training runs
distributed    the ranks, and decisions of the first rank for all
preemption     SIGTERM and SIGUSR1: a checkpoint and exit code 75
resume         claim the run folder, find the checkpoint to resume from
"""
