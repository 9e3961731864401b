"""`tiercache prove`: test over HTTP whether a running engine really restores a prompt from storage.

Read `command` (the options), `run` (the order of the requests) and `verdict` (what the answers mean); then `server` (HTTP with limits),
`completion` (one streamed answer), `engines` (what differs between SGLang and vLLM), `prompt`, `saved`, `show`.
"""
