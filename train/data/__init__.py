"""From records to batches. These modules know the model's input shapes, and nothing else of it.

tokenize       records to tokens, by the model's chat template; which tokens are supervised
chat           the tokens of many conversations: what those of one shape have in common is computed once
examples       the examples of all records of a split
groups         examples that share their images: one prefix, and a branch per example
steps          which examples make up each optimizer step of an epoch
packing        a step's groups as packs, sequences that fit the GPU, distributed over the ranks
sampler        the micro-batches of each step, and the target weights of the loss
mrope          mRoPE positions of text and image tokens
features       sources of a batch's images: cached features, or pixels (to compare with)
collate_rows   collator of padded rows
collate_packs  collator of packs
batches        micro-batches to batches on the device
prefetch       batches made on a thread, ahead of the steps that use them
token_stats    count tokens per record, image and epoch, without training
token_report   the token counts for people: tables, findings
"""
