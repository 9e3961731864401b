"""Entry point of `python -m tiercache.metrics`, which prints docs/metrics.md."""

import sys

from tiercache.metrics.document import markdown

sys.stdout.write(markdown())
