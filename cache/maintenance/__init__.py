"""Maintaining a cache.

verify   compare a cache with its checksums, shard by shard, and remove what is damaged
show     everything that a cache knows about one image
gc       list the caches below a folder, delete leftovers or a whole cache
staging  copy a cache to a nearer disk
"""
