"""The report of one or several runs: an HTML page that needs no network and no script, and its numbers as JSON.

runs      what is known of each run: its folder, its answers and their scores
data      the records of a run: how many, and which images training has seen
scores    exact match with intervals, of all questions and by group
contexts  exact match with own, true and no earlier answers in the prompts
sheet     which answers are shown with their images
part      one part of a report
sections  the parts, one a module
report    all parts together, as a page and as JSON
"""
