"""The sections of the run file: every key with its meaning, its default and what is allowed.

model       the model that is fine-tuned
data        the records and images of the run
context     answers to earlier questions in prompts
cache       the vision-feature cache
lora        the LoRA adapter
batch       how records become optimizer steps and forward passes
train       the training
start       the type of `train.start_from`: another run, or an adapter on the Hub
evaluation  the evaluation
numbers     types of numbers
paths       types of paths: variables are expanded, and must be set
"""
