"""Measurements: each phase beside the stock implementation and beside what the hardware allows.

step       how fast training variants are, side by side
flops      FLOPs of a step, and FLOP/s that the device reaches in large matrix products
"""
