"""Runs `cocodiff` with several lists of words (JSON, on stdin) in one process, so that torch is imported once."""

import json
import sys

from cocodiff.cli import main

sys.exit(max(main(words) for words in json.load(sys.stdin)))
