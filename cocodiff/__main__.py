import sys

from cocodiff.cli import main

sys.exit(main())
