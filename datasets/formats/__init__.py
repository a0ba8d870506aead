"""The forms in which people bring records: how each is known, read and written.

record      the nouns: Record and Turn
checks      what all forms ask of a value, and how a value is shown in a message
image_refs   image references to paths, and paths to references
image_tags   where `<image>` may stand in texts, and taking it out
dialogue    who speaks when: messages to turns, and turns to messages
native       canonical and flat, the project's own
llava       LLaVA and ShareGPT (`conversations`)
alpaca      Alpaca (`instruction`, `input`, `output`)
messages    messages with marks, with lists of parts, with OpenAI's parts
registry     all of them by name, and which one a record has
text_files  JSONL, a JSON array, CSV
parquet     parquet files, and images that are embedded in them
"""
