"""What is in records and their images, what is wrong with them, and which images several files share.

corpus         what is audited: records files, and the images that they name
image_info     what is known of each image: bytes, size, and what is wrong with it
findings       one problem: how severe it is, how often it occurs, and where
questions      records as single questions about images, which are identified by content
texts          near-empty texts, missing values, spaces, and special tokens, which training refuses
repeats        the same question about the same image: duplicates and contradictions
labels         answers that differ only in order, separators, case or units
spelling       words that look like misspellings of others
leaks          images that several files share
vocabulary     the answers of each question, and the majority baseline
audit          runs all of it
report         the audit as text
contact_sheet  some images with a question each, drawn from a seed
page           the audit as one HTML page
"""
