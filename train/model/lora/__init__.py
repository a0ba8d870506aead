"""LoRA: what gets an adapter, and its products, computed faster than PEFT does with the same results.

targets      which modules get LoRA weights
products     which layers get which forward method
scaled       the scale as part of the matrix B
joined       frozen weights and LoRA's matrices as one matrix
linear       layers with a joined matrix
mlp          a gated MLP whose layers have joined matrices
kernels      LoRA's own small products, as Triton kernels
mlp_kernels  what an MLP computes between its products, as Triton kernels
"""
