"""`python -m lookonce`."""

from lookonce.cli import main

main()
