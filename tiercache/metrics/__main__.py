"""`python -m tiercache.metrics` prints docs/metrics.md."""

import sys

from tiercache.metrics.document import markdown

sys.stdout.write(markdown())
