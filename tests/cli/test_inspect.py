from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import Cli
from tests.pipelines.test_inspect import pipeline


def test_table(cli: Cli, tmp_path: Path) -> None:
    result = cli("inspect", pipeline(tmp_path / "a [bold] name"))
    assert (result.code, result.err) == (0, "")
    lines = [line.split() for line in result.out.splitlines() if line.strip()]
    assert lines[0][0] == "FluxPipeline" and "a [bold] name" in result.out
    assert ["scheduler", "FlowMatchEulerDiscreteScheduler"] in lines
    assert ["text_encoder", "CLIPTextModel", "100", "400", "B", "float32", "1", "1"] in lines
    [row] = [" ".join(line) for line in lines if line[0] == "transformer"]
    assert row == "transformer FluxTransformer2DModel (modelopt) 2.11 k 2.1 KiB uint8 94%, bfloat16 6% 1 2"
    assert " ".join(lines[-1]) == "total 2.21 k 2.5 KiB 2 3"


def test_json(cli: Cli, tmp_path: Path) -> None:
    result = cli("inspect", pipeline(tmp_path / "m"), "--json")
    data = json.loads(result.out)
    assert data["pipeline"] == "FluxPipeline"
    assert data["components"]["text_encoder"]["dtypes"] == {"float32": 400}


def test_tiny_pipelines(cli: Cli, tiny_folder: Callable[[str], Path]) -> None:
    for family in ("flux", "sd3"):
        assert cli("inspect", tiny_folder(family)).code == 0


def test_what_is_no_model(cli: Cli, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing", "owner/not-in-the-cache"):
        result = cli("inspect", path)
        assert result.code == 3
        assert str(path) in result.complaint
