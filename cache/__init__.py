"""Phase 1: run the vision tower once over every distinct image and keep what it puts out.

model        what makes features: checkpoint, pixels, tower
store        what lies on disk, and reading it (FORMAT.md)
make         plan and build, by any number of workers
care         verify, repair, show, collect, stage
names        what is said of caches where torch is not wanted
bench        how fast a cache is made
bench_read   how fast it is read

Imports run one way: care -> make -> store -> model.
"""
