"""The replay of a fleet: what routers find, the choice of examples/router.py among them."""

import json

from tiercache_lab.replay import fleet


def test_routers_that_know_what_workers_hold_gain_over_taking_turns(capsys):
    fleet.main(
        "shared-prefix?groups=6&prompts=5&system=512-1024", "qwen3-next-80b-a3b", "1GiB", "40", "3", "30"
    )
    found = {row["router"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert list(found) == ["turns", "least loaded", "llm-d", "ours", "oracle"]
    assert all(0 < row["hits"] < 1 for row in found.values())
    assert (found["turns"]["gains"], found["oracle"]["gains"]) == ([0, 0], [1, 1])
    assert min(found["ours"]["gains"] + found["llm-d"]["gains"]) > 0.5
