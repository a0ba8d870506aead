"""Known sets, from whatever form people have them in: `lookonce data prepare`.

definition  what a set's YAML file says: columns, rules, split
rows        one question about one image, before it is a record
rules       cleaning, by named rules that are counted
duplicates  several rows of one question about one image
splits      which images are trained on, and what leaks
hub         a set on the Hugging Face Hub, downloaded at a pinned revision
sources     what lies at a path: which form, which files, in which portions it is read
readers     the rows of a file: parquet, CSV, JSON, tar, text
lookup      where the image of a row lies that is not embedded
images      image files, written once each, byte for byte
journal     what is done already, so that an interrupted run goes on
extract     from a source to journal and image files
report      what became of every row, as JSON and as a table
compose     from rows to records by part, and the numbers of the report
run         all of it
"""
