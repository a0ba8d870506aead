"""Building a cache.

progress  which images are stored, planned, missing or unusable; progress of a cache, and its workers
encode    decode images and run them through the tower
estimate  what a build will cost, from image headers and a pilot
worker    claim shards, encode and write them, until done or stopped; what a build did
"""
