"""Where the demo model is: inside the installed package, or in the checkout that is installed editable."""

from __future__ import annotations

from pathlib import Path

from omniloom.errors import ModelError


def demo_folder() -> Path:
    """Return the pipeline folder of the demo model. Raises ``ModelError`` if this installation lacks it."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "demo_model", package.parents[1] / "demo" / "model"):
        if (folder / "model_index.json").is_file():
            return folder
    raise ModelError("the demo model is not part of this installation; install the omniloom wheel or use a checkout")
