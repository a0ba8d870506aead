"""Phase 1: run the vision tower once over every distinct image and keep what it puts out.

checkpoint   the model folder, and the tower's tensors in it
pixels       an image file as the tower's input
tower        the tower alone, out of the checkpoint
fingerprint  everything that changes features, as one hash
plan         which images go into which shard
shards       features on disk: safetensors and receipts (FORMAT.md)
build        the loop over all that
read         features from disk, checked
"""
