"""The command line, as `python -m cocodiff`."""

from cocodiff.cli.main import program

program()
