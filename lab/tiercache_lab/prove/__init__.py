"""The verb `tiercache prove`, which tests over HTTP whether a running engine restores a prompt from storage.

Principles:

1. A hit counts only beside a control that no cache can hold.
2. What the server does not say is unknown, never a hit.
3. The same prompt must give the same text: a hit with another one is worse than a miss.

Order of reading: `command` (the options), `run` (the order of the requests, and the one that is saved),
`verdict` (the meaning of the answers, and the output), `server` (HTTP with limits), `completion` (one
streamed answer), `engines` (differences between SGLang and vLLM).
"""
