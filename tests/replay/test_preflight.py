"""The part of preflight that needs no server."""

from __future__ import annotations

from typing import Any

import pytest

from replay.experiment import experiment_of
from replay.preflight import without_servers

H200 = {"count": 1, "kind": "H200"}


@pytest.mark.parametrize(
    ("arrangement", "baseline", "candidate", "gpus", "shared"),
    [
        ("side_by_side", {}, {}, H200, True),
        ("side_by_side", {"devices": [0]}, {"devices": [0]}, H200, True),
        ("side_by_side", {"devices": [0]}, {"devices": [1]}, H200, False),
        ("side_by_side", {"env": {"ROCR_VISIBLE_DEVICES": "1"}}, {}, H200, False),
        ("side_by_side", {}, {}, {"count": 1, "kind": "CPU"}, False),
        ("in_turn", {}, {}, H200, False),
    ],
)
def test_servers_that_may_share_gpus_are_warned_of(
    arrangement: str, baseline: dict[str, Any], candidate: dict[str, Any], gpus: dict[str, Any], shared: bool
) -> None:
    described = experiment_of(
        {
            "model": "m",
            "workload": {"demo": True},
            "serving": {"arrangement": arrangement},
            "backends": {
                "both": {"serve": {"command": "vllm serve m"}, "gpus": gpus},
                "baseline": {"serve": baseline},
                "candidate": {"serve": candidate},
            },
        }
    )
    told: list[str] = []
    without_servers(described, lambda event: told.append(event.text))
    assert any("may use the same GPUs" in text for text in told) == shared
