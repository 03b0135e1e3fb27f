"""python -m blendserve"""

import sys

from blendserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
