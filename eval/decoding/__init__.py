"""Greedy answers, with each image's tokens computed once for all its questions.

answer      one answer, its log-probability and why it ended
dialogue    questions of which each follows the answers before it
waves       which questions are answered together
branches    the state of the answers of a wave while they grow
layout      where the tokens of a wave lie in the buffer of keys and values
passes      passes of the model over prompts, later questions and growing answers
growth      answers grow, token by token, until all have ended
decoder     the passes of waves: packs first, then a token of every answer at a time, then later questions
talk        one conversation, question by question, in keys and values that stay
"""
