"""Records to batches. No module here knows the model, but for the shapes that it takes.

tokenize     records to tokens, and which of them are supervised
token_stats  tokens of records, packs and epochs, before any training
groups       examples that share their images: a prefix once, and a branch for each
steps        which examples make up each optimizer step of an epoch
packing      a step's groups as packs, sequences that fit the GPU, spread over the ranks
sampler      all forward passes of a run, and the loss weight of each example in its step
mrope        positions of text and image tokens
features     where a batch's image features come from: the cache, or pixels (to compare with)
collate_rows   collator of padded rows
collate_packs  collator of packs
batches      forward passes to batches on the device
prefetch     batches made on a thread, ahead of the steps that use them
"""
