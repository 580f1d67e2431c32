import sys

from cocodiff.cli.main import main

sys.exit(main())
