"""The cache phase: run the vision tower once for every distinct image and store its features.

model        what features are computed from: model folder, pixels, tower
store        the files of a cache, and reading them (FORMAT.md)
build        plan and build a cache with any number of workers
maintenance  verify, repair, show, garbage collection, staging
constants    format version, allowed dtypes and backends, commands to suggest; imports no torch

Imports run one way: maintenance -> build -> store -> model.
"""
