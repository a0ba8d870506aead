"""The report of one or several runs: an HTML page that needs no network and no script, and its numbers as JSON.

runs      what is known of each run: its folder, answers, records, scores and costs
contexts  exact match with predicted, reference and no earlier answers in the prompts
answers   right, wrong, won and lost answers with their images, and the most frequent wrong ones
report    all parts together, as JSON and as a page
"""
