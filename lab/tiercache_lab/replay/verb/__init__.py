"""`tiercache replay`: traffic through the real index, policies and controller, without a model.

Reading order: `command` (options), `asking` (from options to the parameters of a study), `show` (progress,
results, and the sources that can be replayed).
"""
