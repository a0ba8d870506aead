"""The training loop: transformers' Trainer, set up from the run file.

session      what training and evaluation share: inputs, opened cache, trainer; a trial of the longest pack
trainer      Trainer over whole optimizer steps; what is measured while training, and when
arguments    Trainer's settings from the run file, and its learning rate schedule
log_files    one line per logging step in log.jsonl, curves.svg, and progress.json while a training runs
trackers     the trackers of `train.track`: TensorBoard, W&B and MLflow
checkpoints  checkpoints with checksums: whole, or not used; which one a run resumes from
distributed  the ranks, decisions of the first rank for all, and stopping after a signal
"""
