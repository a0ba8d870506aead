"""Answers to earlier questions in the prompts of a run's records (`data.context`).

training  the contexts of training and validation records
origin    what the models were trained on whose answers contexts have
"""
