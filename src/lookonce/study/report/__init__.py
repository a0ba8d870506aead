"""The report of a study: its arms compared, how they learn, what chains forget, and what earlier answers are worth.

arms        figures of each arm: its score beside the baseline arm's, its cost, a sentence
curves      validation losses over samples and minutes, chains with all their phases
forgetting  exact match by stage after each phase of a chain of arms
contexts    own, true and no earlier answers of arms with `data.context`
majority    the majority baseline, the same for every arm
tables      tables as CSV and LaTeX files
report      all of it, and the page of the runs
"""
