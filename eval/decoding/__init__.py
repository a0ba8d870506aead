"""Greedy answers, with each image's tokens computed once for all its questions.

answer      one answer, its log-probability and why it ended
key_values  keys and values of many conversations in one buffer, as a cache of transformers
waves       which questions are answered together, and where their tokens lie in the buffer
branches    the state of the answers of a wave while they grow
steps       passes that compute one token of every answer, with dense masks
row_steps   the same on a GPU: FlexAttention by image, captured as a CUDA graph
decoder     the passes: packs first, then a token of every answer at a time
"""
