"""Answers of a model.

questions    the questions of an evaluation, in batches
engines      the ways to answer questions, which eval.engine chooses
generate     greedy answers by transformers' generate; shuffled images
cost         how long it took to answer, and with how much memory
partial      answers on disk while an evaluation runs
predict      the answer to one question about any images, or about none
"""
