"""Fuzzing: `cases` runs a parser on damaged files and says what came of them, `mutations` damages them."""
