"""`lookonce data prepare`: known datasets, downloaded or from a local copy in any layout, to records.

rows        one question about one image, before it is a record: rules, duplicates, splits
definition  the YAML file of a dataset: columns, rules, split
sources     from the files of a dataset, at a path or on the Hub, to rows with images
run         all steps, from rows to the records of train, val and test, and the outcome of every row
"""
