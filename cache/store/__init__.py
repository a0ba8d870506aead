"""The files of a cache, and reading them. ../FORMAT.md specifies the files.

fingerprint  everything that changes features, as one hash, and notes of it
metadata     the JSON files: receipts, plan, manifest and quarantine
shards       features as safetensors files
claims       which worker is building which shard, which processes and runs use the cache, what killed ones left
reader       features from disk, checked: VisionCache and its index
"""
