from __future__ import annotations

import json

from tests.cli.conftest import Cli


def test_table_json_and_markdown(cli: Cli) -> None:
    table = cli("models")
    assert (table.code, table.err) == (0, "")
    assert "QwenImageEditPlusPipeline" in table.out and "not yet" in table.out
    rows = {row["family"]: row for row in json.loads(cli("models", "--json").out)}
    assert rows["wan"]["denoisers"] == ["transformer", "transformer_2"]
    assert rows["flux"]["proven"]["FluxPipeline"] == ["text-to-image"]
    markdown = cli("models", "--markdown").out
    assert markdown.startswith("| family |") and len(markdown.splitlines()) > len(rows)
