"""The model as it trains: without its tower, with LoRA, over rows or packs.

cached_tower  the module that takes the tower's place and returns cached features
load         the checkpoint without its tower, a trained adapter on it
attention    the mask of a pack: which token attends to which
sync_free    the stock model's forward pass over a pack, without host-device syncs
compile      the decoder layers compiled, and prepared for packs
fsdp         the frozen weights sharded over the GPUs (FSDP2)
loss         one forward pass and its part of the step's loss
cuda_graphs  passes over packs recorded as CUDA graphs and replayed
"""
