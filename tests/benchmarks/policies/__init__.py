"""Campaign behind docs/policies.md: every policy on every source, at several sizes and seeds.

    python -m tests.benchmarks.policies run results.jsonl --trace conversation_trace.jsonl --sessions agentic/
    python -m tests.benchmarks.policies tables results.jsonl --write docs/policies.md

`run` appends one JSON line per run to a file. It can be stopped at any time, and goes on where it stopped.
`tables` makes the tables of the page from the file.

Reading order: `matrix` (what is run, and in which order), `rows` (the file of results), `runner` (processes),
`intervals` (statistics), `tables` (Markdown).
"""
