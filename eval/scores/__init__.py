"""Scores of answers.

prediction   one answered question, written to and read from predictions files
headline     the interval of exact match, and how much higher it is than each baseline
match        whether one answer matches the right ones: exactly, as labels, as words
points       whether an answer is a point in a box, or how far from a point
groups       exact match by question, category, source and stage
counts       empty, cut and unseen answers
texts        BLEU, ROUGE, METEOR and chrF
figures      all metrics of the model's answers beside those of the majority answers
metrics      the evaluation: the headline, its groups, and all figures
"""
