"""Answers of a model.

questions    the questions of an evaluation, in batches
generate     greedy answers to a batch of questions
partial      answers on disk while an evaluation runs
predict      the answer to one question about any images, or about none
"""
