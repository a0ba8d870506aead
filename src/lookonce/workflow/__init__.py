"""Sequences of phases, above the phases themselves, which do not call each other.

selftest     before a training, test once on each machine that packs are exact
train        train, evaluate, summarise, report
fetch        download a run's model and check its data, for jobs without internet
"""
