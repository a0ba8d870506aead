"""A study: arms, trained with several seeds each, from one base run file; planned, run, shown and compared.

file       the study file: one YAML page, read and checked
expand     the runs of a study: ordinary run files and run folders
state      what the run folders say: how far each run is, and which belong to an earlier study file
routing    arms whose answers are those of other arms, by the stage of each question
workload   steps, answers and tokens of a run, from its records
builds     the records of the runs, and which of them a build of the cache serves
jobs       processes, what each waits for, and which is started first
pool       a process on each GPU, until all jobs have ended
run        build the caches and train what is missing
missing    what is missing, as jobs for the scheduler of a cluster
plan       what a study will cost
table      the runs of a study as a table
report     the arms compared, as a page and as tables
"""
