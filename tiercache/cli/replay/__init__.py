"""`tiercache replay`: traffic through the real index, policies and controller, without a model.

Reading order: `command` (options), `asking` (from options to a question), `listing` (what can be replayed), `watch` (progress), `table`
and `rounds` (results on a terminal), `lines` (results as JSON).
"""
