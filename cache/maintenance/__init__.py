"""Maintaining a cache.

checks       compare one shard with its receipt
scan         check all shards, on threads where that is faster
verify       compare a cache with its checksums
recompute    encode some images again and compare
repair       restore what can be restored, remove what must be encoded again
damaged      which images a damaged shard has, and where to find them again
rebuild      rebuild receipts from shards, and the plan from receipts
show         everything that a cache knows about one image
inventory    list the caches below a folder
gc           delete leftovers or a whole cache
staging      copy a cache to a nearer disk
"""
