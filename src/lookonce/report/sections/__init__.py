"""The parts of a report. Each module has a function that makes its part from the runs; what is absent is said.

verdict     the headline in words, beside the baselines
comparison  each pair of runs: whether the difference is more than chance
contexts    own, true and no earlier answers in the prompts, side by side
groups      exact match by question, category, source and stage
metrics     all other metrics and counts
curves      losses and learning rate, and exact match of several evaluations
answers     right, wrong, won and lost answers with their images
errors      the most frequent wrong answers, and closed questions
cost        time, memory, bytes, and speed beside plain training
settings    what differs between the runs, or from the defaults
data        records, images that training has seen, what was left out
provenance  versions, hashes, commands, licences, and what is not known
"""
