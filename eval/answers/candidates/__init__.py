"""The likeliest of each question's known answers.

conversations   conversations that end with a candidate, as tokens
known           the candidates of each question
likelihood      log-probabilities of answers that are given, by passes over packs
choice          the questions that have candidates, in batches, and the likeliest of each
"""
