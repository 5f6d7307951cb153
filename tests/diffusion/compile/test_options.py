"""The arguments that each block's ``torch.compile`` gets."""

from __future__ import annotations

from typing import Any

import pytest

import omniloom.diffusion.compile as compile_module
from omniloom.diffusion.compile import regionally_compile
from tests.diffusion.blocks import Model, model

DEFAULTS = {"max_autotune": False, "epilogue_fusion": False}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Arguments that arrived; the stand-in takes an entry out of the options, as torch does."""
    arrived: list[dict[str, Any]] = []

    def stand_in(function: Any, **kwargs: Any) -> Any:
        arrived.append({k: dict(v) if isinstance(v, dict) else v for k, v in kwargs.items()})
        if isinstance(kwargs.get("options"), dict):
            kwargs["options"].clear()
        return function

    monkeypatch.setattr(compile_module.torch, "compile", stand_in)
    return arrived


def net() -> Model:
    made = model(blocks=2)
    made._regional_compile_inductor_options = dict(DEFAULTS)
    return made


@pytest.mark.parametrize("backend", [{}, {"backend": "inductor"}, {"backend": None}])
@pytest.mark.parametrize("mode", [{}, {"mode": None}, {"mode": "default"}])
def test_the_models_options_are_defaults(given: Any, backend: Any, mode: Any) -> None:
    options = {"max_autotune": True, "other": 1}
    made = net()
    regionally_compile(made, dynamic=True, options=options, **backend, **mode)
    kept = {} if mode.get("mode") == "default" else mode
    expected = {"dynamic": True, **backend, **kept, "options": {**DEFAULTS, **options}}
    assert given == [expected, expected]
    assert options == {"max_autotune": True, "other": 1}
    assert made._regional_compile_inductor_options == DEFAULTS


@pytest.mark.parametrize("options", [{}, {"options": None}])
def test_without_options_of_the_caller(given: Any, options: Any) -> None:
    regionally_compile(net(), **options)
    assert given == [{"options": DEFAULTS}] * 2


def test_other_backends_get_none(given: Any) -> None:
    regionally_compile(net(), backend="eager", mode="reduce-overhead")
    assert given == [{"backend": "eager", "mode": "reduce-overhead"}] * 2


@pytest.mark.parametrize(
    ("arguments", "error"), [({"mode": "max-autotune"}, ValueError), ({"options": [1]}, TypeError)]
)
def test_what_cannot_be_combined(given: Any, arguments: Any, error: Any) -> None:
    made = net()
    with pytest.raises(error):
        regionally_compile(made, **arguments)
    assert given == []
    assert "forward" not in made.blocks[0].__dict__


def test_without_defaults_arguments_are_verbatim_but_each_block_has_its_own_options(given: Any) -> None:
    options = {"max_autotune": True}
    regionally_compile(model(blocks=2), mode="reduce-overhead", options=options)
    assert given == [{"mode": "reduce-overhead", "options": {"max_autotune": True}}] * 2
    assert options == {"max_autotune": True}
