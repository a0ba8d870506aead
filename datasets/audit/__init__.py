"""What is in records and their images, what is wrong with them, and what leaks between files.

corpus      what is audited: files of records, and the images they name
pictures    what is known of each image: bytes, size, what is wrong with it
findings    one thing that is wrong, how bad it is, and where
questions   records as single questions about images that are known by content
texts       near-empty texts, written-out missing values, spaces and tokens that training refuses
repeats     the same question about the same image: duplicates and contradictions
labels      answers that say the same in other words: order, separators, case, units
spelling    words that look like misspellings of others
leaks       images that files share
vocabulary  the answers of each question, and what always giving the most frequent one scores
audit       all of it together
report      as text
sheet       some images beside their questions, drawn from a seed
page        as one HTML page
"""
