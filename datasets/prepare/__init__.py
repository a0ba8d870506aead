"""`lookonce data prepare`: known datasets, downloaded or from a local copy in any layout, to records.

definition     the YAML file of a dataset: columns, rules, split
rows           one question about one image, before it is a record
rules          cleaning by named rules that are counted
duplicates     several rows with the same question about the same image
splits         which images are trained on, and what leaks
sources        the files of a dataset, at a path or on the Hub
chunks         the files of a source as rows, in chunks
lookup         finding the image of a row that is not embedded
images         image files, each written once, byte for byte
journal        finished chunks, so that an interrupted run resumes
extract        from a source to the journal and image files
build_records  from rows to the records of train, val and test
report         the outcome of every row, as JSON and as a table
run            all steps
"""
