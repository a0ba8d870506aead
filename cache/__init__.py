"""The cache phase: run the vision tower once for every distinct image and store its features.

format       format version, storage dtypes, header of a safetensors file, commands to suggest; imports no torch
model        what features are computed from: model folder, pixels, tower
store        the files of a cache, and reading them (FORMAT.md)
build        plan and build a cache with any number of workers
maintenance  verify, repair, show, garbage collection, staging

Imports run one way: maintenance -> build -> store -> model.
"""
