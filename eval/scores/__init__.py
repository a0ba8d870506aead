"""Scores of answers.

match        how well one answer matches the right ones: exactly, as labels, as words, as a point, by text metrics
prediction   answered questions: written to and read from predictions files, grouped, counted and scored
metric       the metric that counts: what each question scores by it
reward       what answers are worth that a model draws while it learns from rewards
metrics      the evaluation: the metric that counts beside its baselines, exact match by group, all other figures
samples      several samples of each question: pass@k, majority vote, and whether their rewards differ
"""
