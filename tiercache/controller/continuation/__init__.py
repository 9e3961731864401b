"""Continuations: requests that are parked, and go on where they were."""
