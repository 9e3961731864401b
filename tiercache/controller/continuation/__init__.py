"""Continuations: requests that go on from where another one is, or from where they were themselves."""
