"""What lies on disk, and reading it. ../FORMAT.md specifies the files.

storage      how features are stored: as they are, or in 8 bits with scales
fingerprint  everything that changes features, as one hash
known        fingerprints that were found before
folder       manifest, plan and quarantine
plan         which images go into which shard
shards       features as safetensors files
receipts     what a finished shard holds
direct       large writes past the page cache
claims       which worker has which shard in work
uses         which trainings read a cache
leftovers    what killed processes leave
space        room on the disk
index        where each image lies, for millions of images
read         features from disk, checked: VisionCache
stopwatch    where the time goes
"""
