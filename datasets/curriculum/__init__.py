"""Which records are trained on, and in which order: by their metadata, and by a map from questions to stages.

values      metadata as texts, in which 1 of JSON and "1" of CSV are the same
stage_map   a file with the stage and category of each question
selection   the records that a run is trained on, and those that it leaves out
lessons     the parts of an epoch that are trained on one after another
context     answers to earlier questions in the prompts of later ones
given       the answers of a model in predictions files, as contexts have them
folds       images that training leaves out, for answers about images that a model never saw
"""
