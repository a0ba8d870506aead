"""The self-test: whether packs are exact on this machine, with this GPU and these libraries.

report     the variants of computing packs, and what was compared in each
model      the whole self-test: a small model's loss and gradients of packs beside those of stock rows
"""
