"""The sample: a small synthetic dataset and a model with random weights, the same bytes for the same seed.

scene      what a frame shows, as plain facts drawn from a seed
draw       a scene as pixels
questions  the questions about a frame and their answers
stages     the questions of a sample with stages, whose later answers follow from earlier ones
sizes      frames in the sizes of a real dataset, for measurements
tokenizer  a small tokenizer with Qwen's special tokens
model      a Qwen3-VL with random weights, tiny or of a real size
run_file   a run file that trains the sample
write      writes frames, records, model and run file
"""
