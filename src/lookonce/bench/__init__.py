"""Measurements: each phase beside the stock implementation and beside what the hardware allows.

step       how fast training variants are, side by side, and the share of what the device reaches in large products
"""
