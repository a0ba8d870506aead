"""The model as it trains: without its tower, with LoRA, over padded rows or packs.

cached_tower            the module that replaces the tower and returns cached features
load                    the model without its tower, and LoRA on its language model
frozen                  the frozen weights: in the precision of training, or quantised
lora                    which modules get LoRA weights, and their products
attention               the mask of a pack: which token attends to which (FlexAttention or dense)
sync_free               the stock model's forward pass over a pack, without host-device syncs
linear_attention        layers of linear attention over packs: branches begin with the state that their prefix left
segments                a pack cut into segments, in the order in which a state runs through them
last_layer              the last decoder layer, computed only for the tokens that targets are predicted from
gradient_checkpointing  activations that the backward pass computes again
compile                 the decoder layers compiled, and set up for packs
compile_cache           compiled code that is kept for later processes
fsdp                    the frozen weights sharded over the ranks (FSDP2)
loss                    the weighted loss of one micro-batch
gpu_memory              how much GPU memory a training needs, from measurements
cuda_graphs             forward and backward passes over packs, captured as CUDA graphs and replayed
"""
