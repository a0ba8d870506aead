"""Phase 2: train the language model's LoRA adapter from cached features.

run_file     what a run is: one YAML file
model_source  the model a run begins with, and the fingerprint that it gives its cache
content      a run's records and distinct images, and which cache is theirs
inputs       the same with the model opened: plan, build, open the cache
fetch        what a run needs, brought here for jobs without internet
pin          the model's commit written into a run file
prompt       records to tokens, and which of them are supervised
groups       examples that share their images: a prefix once, and a branch for each
steps        which examples make up each optimizer step of an epoch
packs        a step's groups as sequences that fit the GPU, dealt to the ranks
order        all forward passes of a run, and what each example weighs in its step
positions    where the tokens of text and images stand (mRoPE)
batch        examples to tensors with a row for each
pack_batch   a pack to tensors
vision       where a batch's images come from: the cache, or pixels (to compare with)
feed         forward passes to batches on the device
read_ahead   batches made while the steps before them run
tower        the module that takes the tower's place
model        the model without its tower, and LoRA on what is left
attention    who attends to whom in a pack
fast_layers  the decoder layers while they train on packs
no_waits     the stock model's passes over a pack, without waiting for the GPU
sharding     the frozen weights spread over the GPUs (FSDP2)
loss         one forward pass and its part of the step's loss
recorded     passes over packs as CUDA graphs, replayed
trainer      transformers' Trainer, set up from the run file
warm_up      a trial of the longest pack as training begins
progress     one line a logging step
heartbeat    how far a training is, for whoever asks while it runs
progress_file  the file in which it says so
ranks        the processes that train together, and what the first decides
stopping     a training that is told to stop
session      what a run works with: inputs, opened cache, batches, trainer
evaluate     greedy answers
scores       exact match, baselines
begin        how a training finds its folder, and where it goes on
run          a training from start to end
cost         what records cost in tokens, before any training
predict      one question about any images, or none
ways         the ways to train that are compared
bench_step   these ways side by side
operations   what a step's matrix products cost
step_report  what measuring them has shown, as a table
bench_data   made-up data and a model of real size to measure on
run_folder   what a run leaves behind
summary      what a person reads at the end
stages       what is known of the stages of a run, and how it is shown
pipeline     what of a run is done, and what is missing
"""
