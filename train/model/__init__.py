"""The model as it trains: without its tower, with LoRA, over padded rows or packs.

load              the model without its tower, LoRA on its language model, frozen weights sharded over the ranks
frozen            the frozen weights: in the precision of training, or quantised
lora              which modules get LoRA weights, and LoRA layers whose scale multiplies the matrix B
lora_joined       frozen weights and LoRA's matrices as one matrix, of layers and of a gated MLP
lora_kernels      LoRA's own small products, and what an MLP computes between its products, as Triton kernels
attention         the mask of a pack: which token attends to which (FlexAttention or dense)
linear_attention  layers of linear attention over packs: branches begin with the state that their prefix left
loss              the weighted loss of one micro-batch, and the last decoder layer for its targets alone
compile           the decoder layers compiled, and set up for packs; gradient checkpointing; compiled code kept
gpu_memory        how much GPU memory a training needs, from measurements
packs             the loss of a pack, and forward and backward passes captured as CUDA graphs and replayed
"""
