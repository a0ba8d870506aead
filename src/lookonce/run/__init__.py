"""What a run is: its file, its records and images, its model, its folder. Used by all phases.

config       the run file: one YAML page, read, checked and written
sections     the keys of the run file, each with its default
absolute     a run with absolute paths, as it is recorded
records      a run's records, the contexts in their prompts, and its distinct images
open         open a run: claim what a command changes, then read once what it needs
start_adapter  the adapter of another run with which a training starts
folder       the run folder: what a run writes, and the check that it belongs to this run
claim        one process at a time changes a run folder
progress_file  progress.json, read and written
log_file     log.jsonl as curves of the losses and the learning rate
startup      what a training does before its first step, each piece of work timed and said
pin          write the model's commit into a run file
"""
