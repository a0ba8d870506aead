"""Passes of the model over prompts, later questions and growing answers, which share a buffer of keys and values.

key_values  this buffer: keys and values of many conversations, for each layer
states      states of layers of linear attention, a row for each conversation
inference   how passes run: precision, attention, buffers
attention   the attention of passes, which write to the buffer
prompts     passes over the packs of a wave's prompts, which give the first token of each answer
steps       passes that compute one token of every answer, with dense masks
row_mask    masks of FlexAttention in which each block of rows reads one image
row_steps   passes that compute one token of every answer on a GPU, captured as a CUDA graph
follow_ups  passes over later questions, in the keys and values of what came before
"""
