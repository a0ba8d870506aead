"""A trained adapter, or the model that it was merged into, on the Hugging Face Hub.

base_model   the name of the base model on the Hub
local_paths  what is uploaded names no folder of this machine
facts        what a model card says of a run
usage        the code on the card that asks the model
card         the model card, from the template beside it
files        the files of an upload
push         the repository, the commit, and what refuses them
"""
