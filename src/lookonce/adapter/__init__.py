"""What a trained adapter is used for outside of this project: merged, served by vLLM, uploaded.

save       an adapter of another program as a run, which all commands take
weights    the weights of a merged model: what an adapter changes of a checkpoint, and the files that are written
merge      the whole course of a merge: what refuses it, and its folder
card       the model card of a run
push       an adapter or a merged model on the Hub
challenge  what a repository needs to be a submission to a challenge: a script, explained answers
vllm       whether vLLM serves an adapter: its published rules
"""
