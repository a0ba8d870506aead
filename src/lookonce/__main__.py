"""`python -m lookonce`."""

from lookonce.cli import main

if __name__ == "__main__":  # a process that this program starts imports this module too
    main()
