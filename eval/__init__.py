"""Phase 3: evaluation. Answers of a trained model, and their scores.

answers      greedy answers to the questions of a split, or to one question
scores       exact match beside the majority baseline
run          evaluate a run: questions, answers, scores, files

Imports run one way: run -> answers, scores.
"""
