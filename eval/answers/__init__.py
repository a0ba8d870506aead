"""Answers of a model.

questions    the questions of an evaluation: dialogues, stages, baselines, batches, rows
engines      the ways to answer questions, which eval.engine chooses
files        the files of an evaluation beside its results: the answers so far, and what answering cost
accuracy     exact match of a model while it is trained
"""
