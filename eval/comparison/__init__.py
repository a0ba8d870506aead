"""Whether one run is better than another.

runs       the predictions of the runs that are named, and which runs are seeds of one another
join       the questions that all runs answered, which must be the same
metric     what is compared: exact match, or the F1 of words
route      each question's answer from the run of its stage
compare    scores, paired differences, intervals and p values
report     tables of 80 columns, and a sentence for each pair
"""
