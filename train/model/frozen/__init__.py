"""How the weights that are not trained are kept: in the precision of training, or quantised.

choice    what `train.frozen` names: how such weights are loaded, and what this needs
fp8       fp8, in layers of our own
bnb       int8 and nf4, by transformers' quantiser and bitsandbytes
"""
