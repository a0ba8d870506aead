"""How far a run is, and its results.

status       find the state of a run's phases: plan, cache, training, evaluation
report       the state of a run as text: in full, on one line, as a table row
summary      the figures of a finished run
"""
