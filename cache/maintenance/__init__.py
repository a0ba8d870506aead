"""Maintaining a cache.

verify     compare a cache with its checksums, shard by shard
recompute  encode some images again and compare
repair     restore what can be restored, remove what must be encoded again
show       everything that a cache knows about one image
gc         list the caches below a folder, delete leftovers or a whole cache
staging    copy a cache to a nearer disk
"""
