"""Ranks that serve one model together, and restore the same depth of each request."""

from tiercache.controller.ranks.base import LEADER, MAX_MESSAGE_BYTES, RankGroup

__all__ = ["LEADER", "MAX_MESSAGE_BYTES", "RankGroup"]
