"""The quantization methods as a table: what each one stores, and what it runs with on which device.

Importing this module loads no torch; asking for the table does.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omniloom.platform import Platform
    from omniloom.quantization.kernels.base import DeviceFacts
    from omniloom.quantization.kernels.registry import KernelRow
    from omniloom.quantization.scheme import LayerScheme

SHAPE = (3072, 3072)  # of the layer that the table is about; small or odd ones may run with another kernel
LATER = "reads such checkpoints in a later release"


@dataclasses.dataclass(frozen=True)
class OnlineMethod:
    """A method that quantizes dense weights, with the ``options`` of this variant, and how it does that."""

    method: str
    weights: str
    activations: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def label(self) -> str:
        """Name and options in one line."""
        given = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in self.options.items())
        return " ".join([self.method, *(f"{key}={value}" for key, value in given)])

    def scheme(self) -> LayerScheme:
        """Return how a layer is stored and computed."""
        from omniloom.quantization.factory import build_quant_config
        from omniloom.quantization.methods import QuantizationConfig

        config = build_quant_config(self.method, **self.options)
        assert isinstance(config, QuantizationConfig)
        return config.scheme("layer", SHAPE)


_FP8_TOKENS = "FP8, a scale per token, where the device multiplies FP8; else untouched"
_UNTOUCHED = "untouched"
ONLINE = (
    OnlineMethod("fp8", "FP8 (E4M3), a scale per output channel", _FP8_TOKENS),
    OnlineMethod(
        "fp8",
        "FP8 (E4M3), a scale per 128 x 128 block",
        "FP8, a scale per token and 128 columns, where the device multiplies such blocks; else untouched",
        {"weight_granularity": "block"},
    ),
    OnlineMethod("int8", "8-bit integers, a scale per output channel", "8-bit integers, a scale per token"),
    OnlineMethod("bitsandbytes", "NF4 in blocks of 64, their scales in 8 bits", _UNTOUCHED),
    OnlineMethod("bitsandbytes", "8-bit integers, a scale per output channel", _UNTOUCHED, {"load_in_8bit": True}),
    OnlineMethod("mxfp8", "FP8 (E4M3) in blocks of 32, powers of two as scales", "the same"),
    OnlineMethod("mxfp4", "FP4 (E2M1) in blocks of 32, powers of two as scales", "the same, or MXFP8 for chosen steps"),
    OnlineMethod("mxfp4_dualscale", "as mxfp4, under a 32-bit scale per 512 numbers", "the same"),
)
# methods that no dense weights are brought to; their configs are understood and checked already
PLANNED = {
    "ascend": "msModelSlim checkpoints",
    "awq": "AWQ checkpoints",
    "compressed-tensors": "checkpoints of the compressed-tensors library",
    "gguf": "GGUF files",
    "gptq": "GPTQ checkpoints",
    "inc": "AutoRound checkpoints (also named auto-round)",
    "modelopt": "NVIDIA ModelOpt FP8 checkpoints",
    "modelopt_fp4": "NVIDIA ModelOpt NVFP4 checkpoints",
    "modelopt_mixed": "NVIDIA ModelOpt checkpoints with one format per layer",
    "modelopt_mxfp8": "NVIDIA ModelOpt MXFP8 checkpoints",
    "svdquant": "SVDQuant checkpoints",
    "torchao": "checkpoints that torchao quantized",
}


@dataclasses.dataclass(frozen=True)
class MethodRow:
    """One method: ``bits`` stored per weight, scales included; ``cells``: device -> what a layer runs with there."""

    method: OnlineMethod
    codec: str
    bits: float
    cells: Mapping[str, KernelRow]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "method": self.method.method,
            "options": dict(self.method.options),
            "weights": self.method.weights,
            "activations": self.method.activations,
            "codec": self.codec,
            "bits_per_weight": round(self.bits, 3),
            "devices": {
                name: {"status": cell.status, "kernel": cell.kernel, "reason": cell.reason}
                for name, cell in self.cells.items()
            },
        }


def known_devices() -> dict[str, DeviceFacts]:
    """Return the kinds of devices that the table in the documentation is about."""
    from omniloom.quantization.kernels.base import DeviceFacts

    devices = {
        "CPU with AVX2": DeviceFacts("cpu", None, frozenset({"avx2", "fma"})),
        "CPU with VNNI or AMX": DeviceFacts("cpu", None, frozenset({"avx2", "fma", "avx512_vnni"})),
    }
    named = {(8, 0): "A100", (8, 9): "L40", (9, 0): "H100", (10, 0): "B200"}
    return devices | {f"sm_{a}{b} ({name})": DeviceFacts("cuda", (a, b)) for (a, b), name in named.items()}


def machine_devices(platform: Platform) -> dict[str, DeviceFacts]:
    """Return this machine's CPU and accelerators; several of a kind once, under the name of the first."""
    from omniloom.quantization.kernels.base import DeviceFacts

    found = {"cpu": DeviceFacts("cpu", None, frozenset(platform.cpu.features))}
    for device in platform.devices or ():
        level = (device.capability or "").removeprefix("sm_")
        capability = (int(level[:-1]), int(level[-1])) if device.backend == "cuda" and level.isdigit() else None
        facts = DeviceFacts(device.backend, capability)
        if facts not in found.values():
            found[device.id] = facts
    return found


def method_matrix(devices: Mapping[str, DeviceFacts]) -> list[MethodRow]:
    """Say for every method and device what a large layer would run with, and why."""
    from omniloom.quantization.kernels.registry import kernel_matrix

    rows = []
    for method in ONLINE:
        scheme = method.scheme()
        [*cells] = kernel_matrix(devices.values(), {method.label: scheme}, SHAPE)
        bits = 8 * scheme.codec.nbytes(SHAPE) / (SHAPE[0] * SHAPE[1])
        rows.append(MethodRow(method, scheme.codec.name, bits, dict(zip(devices, cells, strict=True))))
    return rows


def reasons(rows: Sequence[MethodRow]) -> list[tuple[str, str, str]]:
    """Return what there is to say about the cells, as (methods, devices, reason); each reason once where it can be."""
    said: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for device, cell in row.cells.items():
            if cell.reason:
                said.setdefault((cell.reason, row.method.label), []).append(device)
    merged: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (reason, label), devices in said.items():
        merged.setdefault((reason, tuple(devices)), []).append(label)
    everywhere = tuple(rows[0].cells)
    return [
        (", ".join(labels), "everywhere" if devices == everywhere else f"on {', '.join(devices)}", reason)
        for (reason, devices), labels in merged.items()
    ]


def as_markdown(devices: Mapping[str, DeviceFacts]) -> str:
    """Return the table, what there is to say about its cells, and what is planned, for the documentation."""
    rows = method_matrix(devices)
    lines = [f"| method | bits per weight | {' | '.join(devices)} |", "|---|---|" + "---|" * len(devices)]
    for row in rows:
        cells = (f"{cell.status}, `{cell.kernel}`" if cell.kernel else cell.status for cell in row.cells.values())
        lines.append(f"| `{row.method.label}` | {row.bits:.2f} | {' | '.join(cells)} |")
    lines.append("")
    for labels, where, reason in reasons(rows):
        lines.append(f"- {', '.join(f'`{label}`' for label in labels.split(', '))} {where}: {reason}.")
    lines += ["", "| planned method | what it reads |", "|---|---|"]
    lines += [f"| `{name}` | {what} |" for name, what in PLANNED.items()]
    return "\n".join(lines) + "\n"
