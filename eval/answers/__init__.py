"""Answers of a model.

questions    the questions of an evaluation, in batches
dialogues    the dialogues in which questions are answered
staged       the questions of later stages, with the model's own answers to earlier ones
baselines    the same questions as the baselines are asked
blank        grey images in place of all others
engines      the ways to answer questions, which eval.engine chooses
accuracy     exact match of a model while it is trained
wave_size    how many tokens are answered together
generate     greedy answers by transformers' generate
cost         how long it took to answer, with how much memory, and what the answers depend on
rows         the row of each question in a predictions file
partial      answers on disk while an evaluation runs
"""
