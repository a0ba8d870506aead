"""Known sets, from whatever form people have them in: `lookonce data prepare`.

definition     what a set's YAML file says: columns, rules, split
rows           one question about one image, before it is a record
rules          cleaning, by named rules that are counted
duplicates     several rows of one question about one image
splits         which images are trained on, and what leaks
sources        what lies at a path: which form, which files
hub            a set on the Hugging Face Hub, downloaded at a commit
chunks         what readers of files give: rows, in portions
parquet_files  the reader of parquet files
text_files     the readers of CSV, JSON, JSONL, and of question|answer lines
tar_files      the reader of WebDataset tars
lookup         where the image of a row lies that is not embedded
images         image files, written once each, byte for byte
journal        what is done already, so that an interrupted run goes on
extract        from a source to journal and image files
build_records  from rows to records by part
report         what became of every row, as JSON and as a table
run            all of it
"""
