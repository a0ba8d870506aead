"""Measurements: each phase beside the stock implementation and beside what the hardware allows.

cache_build  how fast a cache is built
cache_read   how fast a cache is read
variants     the training variants that are compared
step_time    measure training variants side by side
step_report  their figures as a table
answers      how fast questions are answered, with shared prefixes and by generate
flops        FLOPs of the matrix products of a step
matmul       FLOP/s that the device reaches in large matrix products
synthetic    synthetic data and a model of real size
"""
