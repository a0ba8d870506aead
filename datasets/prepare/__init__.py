"""`lookonce data prepare`: known datasets, downloaded or from a local copy in any layout, to records.

rows           one question about one image, before it is a record: rules, duplicates, splits
definition     the YAML file of a dataset: columns, rules, split
sources        the files of a dataset, at a path or on the Hub, as rows
extract        from a source to rows with images
build_records  from rows to the records of train, val and test, and the outcome of every row
run            all steps
"""
