"""The record formats: how each one is recognised, read and written.

record            the data classes of a record, the usual names of its keys, and the checks that all formats share
image_references  what a record says of an image, as a path; image tags and marks in texts
conversations     the formats of other programs: LLaVA, ShareGPT, messages, Alpaca
registry          all formats by name, which one a record has, and the project's own two
"""
