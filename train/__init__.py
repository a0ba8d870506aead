"""Phase 2: train the language model's LoRA adapter from cached features.

run_file     what a run is: one YAML file
inputs       what a run reads: checkpoint, records, distinct images, cache
prompt       records to tokens, and which of them are supervised
vision       where a batch's images come from: the cache, or pixels (to compare with)
batch        examples to tensors
tower        the module that takes the tower's place
model        the model without its tower, and LoRA on what is left
trainer      transformers' Trainer, set up from the run file
progress     one line a logging step
evaluate     greedy answers, exact match, baselines
run          a training from start to end
predict      one question about one image
compare      cached and plain side by side
run_folder   what a run leaves behind
summary      what a person reads at the end
"""
