"""What a trained adapter is used for outside of this project: merged, checked for other programs, uploaded.

embeds         cached features as the image_embeds that vLLM takes
merge          merge an adapter into its model: the whole course of it
merge_changes  what an adapter changes: low-rank products by PEFT's rule, new values
merge_check    what must be true before: a trained run, its own model, weights that are not quantised
merge_compare  the same questions of the model with its adapter and of the merged one
merge_files    safetensors files, read and written a block at a time
merge_folder   the result while it is written: its record, what is copied, its name at the end
merge_names    where a checkpoint's tensors belong in the model
merge_shards   the plan of all tensors, and writing one file of them
upload         an adapter or a merged model on the Hub, with its card
vllm           whether vLLM serves an adapter: its published rules
"""
