"""Parts that the stores on a local disk share: directory, checks of LMDB's file, settings, threads.

Principles:

1. A directory has one owner, or processes that share it by its locks; others are refused by pid.
2. A file that can end the process by a signal is first examined by reads, or by a child process.
3. What is damaged is put aside before it is replaced.
"""
