"""The report of a study: its arms compared, what chains forget, and what each arm cost.

arms        figures of each arm: its score beside the baseline arm's, its cost, a sentence
forgetting  exact match by stage after each phase of a chain of arms
tables      tables as CSV and LaTeX files
report      all of it, and the page of the runs
"""
