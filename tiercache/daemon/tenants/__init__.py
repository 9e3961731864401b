"""Tenants of a daemon: their views of the store, their fair part of it, and their account.

Read in this order: `store` (names, fence, and the way of one call), `fairness` (values and namespaces),
`account` (rows by hour, and the calls of a tenant in tokens and seconds).
"""
