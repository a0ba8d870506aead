"""Greedy answers, with each image's tokens computed once for all its questions.

answer      one answer, its log-probability and why it ended
waves       which questions are answered together
layout      where the tokens of a wave lie in the buffer of keys and values
key_values  this buffer: keys and values of many conversations, for each layer
branches    the state of the answers of a wave while they grow
attention   the attention of prompts and of growing answers, which write to the buffer
prompts     passes over the packs of a wave's prompts, which give the first token of each answer
steps       passes that compute one token of every answer, with dense masks
row_steps   the same on a GPU: FlexAttention by image, captured as a CUDA graph
decoder     the passes: packs first, then a token of every answer at a time
"""
