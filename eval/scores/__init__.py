"""Scores of answers.

match        how well one answer matches the right ones: exactly, as labels, as words, as a point, by text metrics
prediction   answered questions: written to and read from predictions files, grouped, counted and scored
metrics      the evaluation: exact match beside its baselines, by group, and all other figures
samples      several samples of each question: pass@k, majority vote, and whether their rewards differ
"""
