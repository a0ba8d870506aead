"""What a trained adapter is used for outside of this project: merged, checked for other programs, uploaded.

embeds   cached features as the image_embeds that vLLM takes
merging  an adapter added to its model: a model folder
upload   an adapter or a merged model on the Hub, with its card
vllm     whether vLLM serves an adapter: its published rules
"""
