"""From records to batches. These modules know the model's input shapes, and nothing else of it.

tokenize     records to tokens, by the model's chat template; which tokens are supervised; the examples of a split
packing      groups of examples that share images, and packs of groups that fit the GPU, for each rank
sampler      the examples and micro-batches of each optimizer step, and the target weights of the loss
batches      the tensors of packs and rows, features of images, and batches made ahead of the steps that use them
dataset      the public pieces: a dataset of records, the packs of an epoch, batches of rows and of packs
policy       a step that learns from rewards: answers drawn to questions as packs, and what each weighs
token_stats  count tokens per record, image and epoch, without training
"""
