"""The training loop: transformers' Trainer, set up from the run file.

session      what a training and an evaluation work with: inputs, opened cache, collator, trainer
trainer      Trainer over whole optimizer steps
warmup       the longest pack is tried first: compilation, memory, CUDA graphs
metrics_log  one line a logging step, and log.jsonl
heartbeat    progress.json while a training runs
distributed  the ranks, and what the first decides for all
preemption   SIGTERM and SIGUSR1: a checkpoint and exit code 75
resume       claim the run folder, find the checkpoint to resume from
"""
