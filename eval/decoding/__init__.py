"""Greedy answers or samples, with each image's tokens computed once for all its questions.

dialogue  questions of which each follows the answers before it, and their answers
sampling    the next token: the likeliest, or one that is drawn
batches     which questions are answered together, where their tokens lie, and how far their answers are
buffers   keys and values of many conversations, or their states of linear attention
passes    passes of the model over prompts, later questions and growing answers
decoder   the answers of batches
"""
