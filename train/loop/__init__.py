"""The training loop: transformers' Trainer, set up from the run file.

trainer      PackTrainer: Trainer over whole optimizer steps; what is measured while training, and when
warmup       the trial of the longest pack in front of a training
first_pack   the check in front of a training that packs are exact here
rewards      training by rewards: each step draws answers, and learns from them
session      the trainer of an open run; what to change if the model does not fit the GPU
arguments    Trainer's settings from the run file, and its learning rate schedule
log_files    one line per logging step in log.jsonl, progress.json while a training runs, and trackers
checkpoints  checkpoints with checksums: whole, or not used; which one a run resumes from
distributed  the ranks, decisions of the first rank for all, and stopping after a signal
"""
