"""Phase 3: answers of a trained model, and their scores.

answers      greedy answers to a split's questions, or to one question
scores       exact match beside the majority baseline
run          evaluate a run: questions, answers, scores, files

Imports run one way: run -> answers, scores.
"""
