"""Answers of a model.

questions    the questions of an evaluation: dialogues, stages, baselines, batches, rows
engines      the ways to answer questions, which eval.engine chooses
files        the files of an evaluation beside its results: the answers so far, and what answering cost
accuracy     what a model scores while it is trained
policy       what a training by rewards learns from: drawn answers and what they are worth
"""
