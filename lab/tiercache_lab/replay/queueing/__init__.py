"""Queueing: requests that wait for a place, share bandwidth, and are computed by one engine."""
