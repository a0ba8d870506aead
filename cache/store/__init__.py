"""The files of a cache, and reading them. ../FORMAT.md specifies the files.

dtypes             how features are stored: unchanged, or in 8 bits with scales
fingerprint        everything that changes features, as one hash
fingerprint_notes  fingerprints recorded with what they were computed from
manifest           manifest, plan files and quarantine
plan               which images belong to which shard
shards             features as safetensors files
receipts           what a finished shard holds
direct_io          large writes that bypass the page cache
claims             which worker is building which shard, and which processes use the cache
uses               which runs read a cache
leftovers          what killed processes leave behind
index              the offset of each image, for millions of images
reader             features from disk, checked: VisionCache
stopwatch          seconds of a build by operation
"""
