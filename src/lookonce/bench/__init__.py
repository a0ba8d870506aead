"""Measurements: phases side by side with the usual way, and with what the hardware allows.

cache_build  how fast a cache is built
cache_read   how fast a cache is read
variants     the training variants that are compared
step_time    training variants side by side, step by step
step_report  their figures as a table
flops        FLOPs of the matrix products of a step
synthetic    made-up data and a model of real size
"""
