"""Phase 1: run the vision tower once over every distinct image and store its features.

model        what makes features: checkpoint, pixels, tower
store        the files on disk, and reading them (FORMAT.md)
build        plan and build, by any number of workers
maintenance  verify, repair, show, garbage collection, staging
constants    format version, allowed dtypes and backends, commands to suggest; imports no torch

Imports run one way: maintenance -> build -> store -> model.
"""
