"""Scores of answers.

metrics      exact match, overall and by question, beside the majority baseline
"""
