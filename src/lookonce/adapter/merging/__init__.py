"""A model folder with the adapter of a run added to its weights.

merge    the whole course of it
changes  what an adapter changes: low-rank products by PEFT's rule, new values
check    what must be true before: a trained run, its own model, weights that are not quantised
compare  the same questions of the model with its adapter and of the merged one
files    safetensors files, read and written a block at a time
folder   the result while it is written: its record, what is copied, its name at the end
names    where a checkpoint's tensors belong in the model
shards   the plan of all tensors, and writing one file of them
"""
