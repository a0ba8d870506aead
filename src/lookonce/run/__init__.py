"""What a run is: its file, its records and images, its model, its folder. Used by all phases.

config       the run file: one YAML page, read, checked and written
sections     the keys of the run file, each with its default
grpo         the keys of its section for reinforcement learning
records      a run's records, the contexts in their prompts, and its distinct images
open         open a run: claim what a command changes, then read once what it needs
start_adapter  the adapter of another run with which a training starts
folder       the run folder: what a run writes, the check that it belongs to this run, and the claim of one process
log_file     log.jsonl as curves of the losses and the learning rate; progress.json
startup      what a training does before its first step, each piece of work timed and reported
"""
