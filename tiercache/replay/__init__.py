"""Traffic replayed through the real index, policies and controller, without a model and without bytes.

Reading order: `base` (requests and their sources), `sources` (traces and generators), `plane` (pools and engines without memory), `drive`
(one run), `bounds` (what no policy can beat), `results`.
"""
