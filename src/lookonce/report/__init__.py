"""The report of one or several runs: an HTML page that needs no network and no script, and its numbers as JSON.

runs        what is known of each run: its folder, answers, records and scores; and what a part of a report is
scores      the headline in words, the comparison of each pair of runs, scores by group, other metrics
contexts    exact match with own, true and no earlier answers in the prompts
answers     right, wrong, won and lost answers with their images, and the most frequent wrong ones
training    losses, learning rate and exact match over steps; time, memory, bytes and speed
provenance  settings, records and leaks, versions, hashes, commands, licences, and what is not known
report      all parts together, as a page and as JSON
"""
