"""Sequences of phases, above the phases themselves, which do not call each other.

train        train, evaluate, summarise
fetch        download a run's model and check its data, for jobs without internet
"""
