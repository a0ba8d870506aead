"""The sample: a small synthetic dataset and a model with random weights, the same bytes for the same seed.

scene  what a frame shows, as plain facts drawn from a seed; its questions, and its pixels
model  a model with random weights, tiny or of a real size, and its tokenizer
write  writes frames, records, model and run file
"""
