"""The record formats: how each one is recognised, read and written.

record      the data classes Record and Turn
checks      checks of a value that all formats share, and how an error message shows the value
coerce      answers that are numbers or booleans, as text
unanswered  questions whose answer is not known
image_refs  image references to paths, and paths to references
image_tags  where `<image>` may appear in a text, and removing it
dialogue    messages to turns, and turns to messages
native      canonical and flat, the project's own formats
llava       LLaVA and ShareGPT (`conversations`)
alpaca      Alpaca (`instruction`, `input`, `output`)
messages    messages with image tags, with content parts, and with OpenAI's content parts
registry    all formats by name, and which one a record has
text_files  JSONL, JSON arrays and CSV
parquet     parquet files, and images embedded in them
"""
