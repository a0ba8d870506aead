"""Answers of a model.

generate     greedy answers to many questions, in batches
predict      the answer to one question about any images, or about none
"""
