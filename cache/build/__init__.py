"""Building a cache.

estimate     what a build will cost, from image headers and a pilot
planner      which images are stored, planned or missing
decode       decode images ahead of the tower
encode       run images through the tower
worker       claim shards, encode and write them
preemption   signals that ask to stop
report       what a build did
unusable     images that a build could not encode, with the reasons
status       progress of a cache, and its workers
"""
