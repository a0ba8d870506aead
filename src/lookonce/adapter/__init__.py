"""What a trained adapter is used for outside of this project: merged, checked for other programs, uploaded.

save           an adapter of another program as a run, which all commands take
weights        what an adapter changes of a checkpoint: files of tensors, places of tensors, the changes
merged_folder  a merged model: its files of weights, and its folder until it is complete
merge          the whole course of a merge, with the questions that are asked of both models
card           the model card of a run
push           an adapter or a merged model on the Hub
embeds         cached features as the image_embeds that vLLM takes
vllm           whether vLLM serves an adapter: its published rules
"""
