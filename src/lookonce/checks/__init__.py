"""Check a run file before anything is run: all that would stop the run later, at once. One check a module.

report    what was found, a line each, as a table
run_file  keys and values
settings  schedule, optimizer, packages, hardware, evaluation split
records   records that cannot be read
model     model folder, tokenizer, adapter
template  chat templates that training refuses
images    images in the cache, to be encoded, or unusable
tokens    lengths of records
disk      room for features and checkpoints
memory    GPU memory, by the documented measurements
start     the run with whose adapter the training starts
output    the run folder and the folder of caches
check     all of them
"""
