"""Looking after a cache.

checks       one shard against its receipt
scan         all shards looked at, on threads where that is faster
verify       the whole cache against its checksums
recompute    some images encoded again and compared
repair       mend what can be mended, remove what must be made again
rebuild      receipts and plans put together from what is left
show         all that is known of an image
inventory    all that is known of each cache below a root
gc           what of it may go, and deleting
staging      a copy on a disk nearer by
"""
