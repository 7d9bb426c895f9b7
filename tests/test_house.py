"""The package stays as small as house.toml says, and old caps do not stay far above what is there."""

from __future__ import annotations

from tests.house import caps, counts, too_large


def test_the_house_stays_light() -> None:
    excess = too_large(counts(), caps())
    assert not excess, "; ".join(excess)


def test_growth_is_found() -> None:
    allowed = {"house": {"lines": 10}, "tokens": {"cli": 5}}
    assert too_large({"house": {"lines": 10}, "tokens": {"cli": 5}}, allowed) == []
    found = too_large({"house": {"lines": 11}, "tokens": {"cli": 5, "new": 1}}, allowed)
    assert found == ["house.lines is 11; its cap in house.toml is 10", "tokens.new is 1; its cap in house.toml is 0"]
