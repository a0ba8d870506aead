"""LoRA: what gets an adapter, and its products, computed faster than PEFT does with the same results.

targets   which modules get LoRA weights
products  which layers get which forward method
scaled    the scale as part of the matrix B
joined    the frozen weight and LoRA's matrices as one matrix
kernels   LoRA's own small products, as Triton kernels
"""
