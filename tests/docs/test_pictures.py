"""The pictures that are drawn from the package are up to date."""

from __future__ import annotations

from docs.pictures import draw_architecture, draw_flows, draw_logo


def test_the_architecture_shows_every_package() -> None:
    """``python -m docs.pictures.draw_architecture`` draws it."""
    drawn = draw_architecture.architecture()
    assert draw_architecture.PATH.read_text(encoding="utf-8") == drawn
    assert all(f">{room}</text>" in drawn for room in draw_architecture.imports())


def test_the_logo_is_up_to_date() -> None:
    """``python -m docs.pictures.draw_logo`` draws it."""
    assert draw_logo.PATH.read_text(encoding="utf-8") == draw_logo.logo()


def test_the_flows_are_up_to_date() -> None:
    """``python -m docs.pictures.draw_flows`` draws them."""
    for name, drawn in draw_flows.PICTURES.items():
        assert draw_flows.path_of(name).read_text(encoding="utf-8") == drawn(), name
