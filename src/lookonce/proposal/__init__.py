"""A first run file: look at the records and the machine, propose values, write them with their reasons.

facts     what the records, the images, the model and the machine are
values    proposed values, each with its reason
run_file  the run file as text
"""
