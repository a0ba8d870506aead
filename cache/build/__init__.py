"""Making a cache.

estimate     what it will cost, from headers and a pilot
planner      what is there, what is planned, what is missing
decode       images ahead of the tower
encode       images through the tower
worker       one worker's part: claim, encode, write
preemption   signals that ask to stop
report       what a build did
status       how far it is, and who is at work
"""
