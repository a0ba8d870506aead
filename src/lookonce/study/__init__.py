"""A study: variants, trained with several seeds each, from one base run file; planned, run, shown and compared.

file     the study file, read and checked, and its runs: ordinary run files and run folders
state    how far the runs are, by what their folders say; and variants whose answers are those of other variants
pool     jobs, and a process on each GPU, until all have ended
run      what is missing, as jobs: run here, or listed for the scheduler of a cluster
plan     what a study will cost
figures  figures of the variants, as tables
report   the variants compared, as a page and as tables
"""
