from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniloom import config
from omniloom.config import UNSET, RuntimeConfig, coerce, load_file, register, register_section, to_plain
from omniloom.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Tiles:
    tiling: bool = False
    size: int = 64
    overlap: float = 0.25
    mode: str | None = None
    steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"tiles.size={self.size}: must be at least 1")


def _level(value: Any) -> int:
    if value not in (0, 1, 2):
        raise ValueError("must be 0, 1 or 2")
    return int(value)


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three options of our own instead of the real ones."""
    monkeypatch.setattr(config, "_OPTIONS", {})
    register("level", default=1, parse=_level, help="A number.")
    register("name", default=None, parse=lambda value: None if value is None else str(value), help="A name.")
    register_section("tiles", help="A section.")(Tiles)


def test_defaults() -> None:
    cfg = RuntimeConfig.resolve()
    assert dict(cfg) == {"level": 1, "name": None, "tiles": Tiles()}
    assert cfg.source("level") == "default"
    assert cfg.tiles.size == cfg["tiles"].size == 64
    assert len(cfg) == 3


def test_later_layers_win() -> None:
    cfg = RuntimeConfig.resolve(file={"level": 0, "name": "a"}, cli={"name": "b"})
    assert (cfg.level, cfg.name) == (0, "b")
    assert (cfg.source("level"), cfg.source("name")) == ("file", "cli")


def test_explicit_zero_and_none_are_given() -> None:
    assert RuntimeConfig.resolve(file={"level": 2}, cli={"level": 0}).level == 0
    assert RuntimeConfig.resolve(file={"name": "a"}, cli={"name": None}).name is None


def test_unset_is_not_given() -> None:
    cfg = RuntimeConfig.resolve(file={"level": 2, "tiles": {"size": 8}}, cli={"level": UNSET, "tiles": {"size": UNSET}})
    assert (cfg.level, cfg.tiles.size, cfg.source("level")) == (2, 8, "file")
    assert not UNSET and repr(UNSET) == "UNSET"


def test_sections_merge_field_by_field() -> None:
    cfg = RuntimeConfig.resolve(file={"tiles": {"tiling": True, "size": 8}}, cli={"tiles": {"size": 16}})
    assert cfg.tiles == Tiles(tiling=True, size=16)


def test_a_section_object_under_a_mapping_keeps_its_fields() -> None:
    cfg = RuntimeConfig.resolve(config={"tiles": Tiles(tiling=True)}, python={"tiles": {"size": 16}})
    assert cfg.tiles == Tiles(tiling=True, size=16)


def test_a_section_object_over_a_mapping_replaces_it() -> None:
    assert RuntimeConfig.resolve(file={"tiles": {"size": 8}}, python={"tiles": Tiles()}).tiles == Tiles()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"levle": 1}, "unknown option 'levle'; did you mean 'level'? (allowed: level, name, tiles)"),
        ({"zzz": 1}, "unknown option 'zzz' (allowed: level, name, tiles)"),
        ({"tiles": {"tilling": True}}, "unknown key 'tilling' in option 'tiles'; did you mean 'tiling'?"),
        ({"tiles": {3: True}}, "unknown key 3 in option 'tiles'"),
        ({"level": 7}, "option level=7: must be 0, 1 or 2"),
        ({"tiles": 5}, "option tiles=5: give a mapping with some of: tiling, size"),
        ({"tiles": {"size": 0}}, "tiles.size=0: must be at least 1"),
        ({"tiles": {"size": True}}, "option tiles.size=True: must be of type int"),
        ({"tiles": {"size": 1.5}}, "option tiles.size=1.5: must be of type int"),
        ({"tiles": {"tiling": 1}}, "option tiles.tiling=1: must be of type bool"),
        ({"tiles": {"overlap": "0.5"}}, "option tiles.overlap='0.5': must be of type float"),
        ({"tiles": {"overlap": float("nan")}}, "option tiles.overlap=nan: must be of type float"),
        ({"tiles": {"overlap": 10**400}}, "must be of type float"),
        ({"tiles": {"mode": 3}}, "option tiles.mode=3: must be of type str or null"),
    ],
)
def test_wrong_input_says_what_is_allowed(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RuntimeConfig.resolve(cli=given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_immutable() -> None:
    cfg = RuntimeConfig.resolve()
    with pytest.raises(AttributeError, match="immutable"):
        cfg.level = 2
    with pytest.raises(AttributeError, match="no option 'nope'"):
        _ = cfg.nope
    with pytest.raises(TypeError):
        cfg["level"] = 2  # type: ignore[index]


def test_copies_and_pickles() -> None:
    cfg = RuntimeConfig.resolve(cli={"level": 0})
    for twin in (copy.copy(cfg), copy.deepcopy(cfg), pickle.loads(pickle.dumps(cfg))):
        assert twin == cfg and hash(twin) == hash(cfg) and twin.source("level") == "cli"


def test_registering_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="registered twice"):
        register("level", default=1, parse=int, help="")


values = st.fixed_dictionaries(
    {},
    optional={
        "level": st.sampled_from([0, 1, 2]),
        "name": st.one_of(st.none(), st.text(max_size=5)),
        "tiles": st.fixed_dictionaries(
            {},
            optional={
                "tiling": st.booleans(),
                "size": st.integers(1, 2**40),
                "overlap": st.floats(allow_nan=False, allow_infinity=False),
                "mode": st.one_of(st.none(), st.text(max_size=5)),
                "steps": st.lists(st.integers(), max_size=3),
            },
        ),
    },
)


@given(given=values)
def test_a_dump_resolves_to_the_same_config(given: dict[str, Any]) -> None:
    cfg = RuntimeConfig.resolve(file=given)
    again = RuntimeConfig.resolve(dump=json.loads(json.dumps(cfg.to_dict())))
    assert again == cfg and hash(again) == hash(cfg)


@given(given=values)
def test_json_yaml_and_python_agree(given: dict[str, Any]) -> None:
    import tempfile

    import yaml

    with tempfile.TemporaryDirectory() as folder:
        as_json, as_yaml = Path(folder, "c.json"), Path(folder, "c.yaml")
        as_json.write_text(json.dumps(given), encoding="utf-8")
        as_yaml.write_text(yaml.safe_dump(given), encoding="utf-8")
        resolved = [RuntimeConfig.resolve(x=layer) for layer in (given, load_file(as_json), load_file(as_yaml))]
    assert resolved[0] == resolved[1] == resolved[2]


@given(lower=values, upper=values)
def test_what_the_upper_layer_gives_is_what_counts(lower: dict[str, Any], upper: dict[str, Any]) -> None:
    both = RuntimeConfig.resolve(lower=lower, upper=upper)
    for layer in (lower, upper):
        for key, value in layer.items():
            if key != "tiles" and (layer is upper or key not in upper):
                assert both[key] == value
    for field, value in upper.get("tiles", {}).items():
        assert getattr(both.tiles, field) == (tuple(value) if field == "steps" else value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.json", "{", "is not valid JSON"),
        ("c.yaml", "a: [", "is not valid YAML"),
        ("c.yaml", "day: 2020-13-45", "is not valid YAML"),
        ("c.yaml", "- a\n- b\n", "must hold a mapping"),
        ("c.yaml", "1: a\n", "must hold a mapping"),
        ("c.json", "[" * 100_000, "is not valid JSON"),
    ],
)
def test_malformed_files(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_file(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_binary_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_file(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_file(tmp_path / "b.yaml")
    (tmp_path / "e.yaml").write_text("")
    assert load_file(tmp_path / "e.yaml") == {}


def test_to_plain() -> None:
    assert to_plain({"p": Path("/a"), "u": UNSET, "t": (1, Tiles())}) == {"p": "/a", "t": [1, to_plain(Tiles())]}


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [(3, float, 3.0), ([1, 2], tuple[int, ...], (1, 2)), (None, int | None, None), ("x", int | str, "x"), (1, Any, 1)],
)
def test_coerce(value: Any, hint: Any, expected: Any) -> None:
    assert coerce(value, hint, "x") == expected
    assert type(coerce(value, hint, "x")) is type(expected)
