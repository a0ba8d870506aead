"""What of a run is done, and what it came to.

status       plan, cache, training, evaluation: done and missing
report       the same as text
summary      the numbers of a finished run
"""
