"""Parts that the stores on a local disk share: directory, owners, names of namespaces, settings.

Principles:

1. A directory has one owner, or processes that share it by its locks; others are refused by pid.
2. The small files of a store are replaced whole, and nothing of the state is relied on.
3. What is damaged is put aside before it is replaced.
"""
