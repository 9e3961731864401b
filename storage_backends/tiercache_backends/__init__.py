"""The stores that come with tiercache: `memory` and `file`. Found by entry point, and imported by nothing but that."""
