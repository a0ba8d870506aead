"""What lies on disk, and reading it. ../FORMAT.md specifies the files.

dtypes       how features are stored: as they are, or in 8 bits with scales
fingerprint  everything that changes features, as one hash
fingerprint_notes  fingerprints that were found before
manifest     manifest, plan and quarantine
plan         which images go into which shard
shards       features as safetensors files
receipts     what a finished shard holds
direct_io    large writes past the page cache
claims       which worker has which shard in work
uses         which trainings read a cache
leftovers    what killed processes leave
index        where each image lies, for millions of images
reader       features from disk, checked: VisionCache
stopwatch    where the time goes
"""
