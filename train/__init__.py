"""Phase 2: train the language model's LoRA adapter from cached features.

data         records to tokens, groups, optimizer steps, packs and batches
model        the model without its tower, LoRA, attention over packs, compilation, CUDA graphs, loss
loop         transformers' Trainer set up for a run: warm-up, ranks, preemption, logging
train        one training, from its run folder to its adapter

Imports run one way: train -> loop -> model -> data.
"""
