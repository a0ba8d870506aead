"""Check a run file before anything is run: all that would stop the run later, at once.

report  what was found, a line each, as a table
inputs  records, model, tokenizer and chat template, images, and the lengths of records
check   keys and values, settings, GPU memory, disk space, folders; and all checks together
"""
