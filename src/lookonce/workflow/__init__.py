"""What a command does in a row, above the phases: they do not know of each other's order.

train        train, evaluate, summarise
fetch        download what a run needs, for jobs without internet
"""
