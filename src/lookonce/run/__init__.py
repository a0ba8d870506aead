"""What a run is: its file, its records and images, its model, its folder. Used by all phases.

config       the run file: one YAML page, every key with its default
paths        types of the paths in a run file: variables are expanded, and must be set
records      a run's records and distinct images, and the cache they belong to
model_ref    the model a run starts from, and the fingerprint of its cache
inputs       a run's records with the model opened: plan, build, open the cache
folder       the run folder: what a run writes, and the check that it belongs to this run
progress_file  progress.json, read and written
pin          write the model's commit into a run file
"""
