"""The readers of files with rows and images: one for each file type, used by records, archives and `data prepare`.

parquet       rows, single columns and embedded images of parquet files
image_column  the usual names of columns, and which column of a parquet file holds images
text          CSV, JSON arrays and JSONL
file_kind     what kind of file holds records, and what other files are
tar           members and WebDataset samples of tar files
"""
