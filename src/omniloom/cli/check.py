"""``omniloom check``: what this machine can do, and what omniloom will use."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omniloom.cli.show import show_bytes, show_rows, styled

if TYPE_CHECKING:
    from omniloom.platform import Platform


def check(
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON object.")] = False,
    debug: Annotated[bool, typer.Option("--debug", metavar="", help="Show a traceback if something fails.")] = False,
) -> None:
    """Show what this machine can do and what omniloom will use, with the reasons."""
    from omniloom.cli.noise import hushed
    from omniloom.platform import detect

    with hushed(debug):
        platform = detect(devices=True)
        choices = _choices(platform)
        methods = _methods(platform)
    if as_json:
        print(json.dumps({**platform.to_dict(), "choices": choices, "methods": methods}, indent=2))
    else:
        _show(platform, choices, methods)


def _choices(platform: Platform) -> dict[str, dict[str, str]]:
    from omniloom.cli.target import can_write_mp4
    from omniloom.errors import ModelError
    from omniloom.pipelines.demo import demo_folder
    from omniloom.platform import choose_device, choose_dtype

    device = choose_device(platform.devices or ())
    dtype = choose_dtype(device.value, cpu=platform.cpu, devices=platform.devices)
    try:
        demo = {"value": "yes", "reason": str(demo_folder())}
    except ModelError as error:
        demo = {"value": "no", "reason": str(error)}
    video = ("yes", "PyAV is installed") if can_write_mp4() else ("no", "pip install 'omniloom[video]' brings PyAV")
    return {
        "device": {"value": device.value, "reason": device.reason},
        "dtype": {"value": dtype.value, "reason": dtype.reason},
        "mp4": {"value": video[0], "reason": video[1]},
        "demo": demo,
    }


def _methods(platform: Platform) -> dict[str, dict[str, Any]]:
    """Return quantization method -> device -> what a large layer runs with there."""
    from omniloom.quantization.catalog import machine_devices, method_matrix

    return {row.method.label: row.to_dict()["devices"] for row in method_matrix(machine_devices(platform))}


def _show(platform: Platform, choices: dict[str, dict[str, str]], methods: dict[str, dict[str, Any]]) -> None:
    print(styled("This machine", "1", sys.stdout))
    print(*show_rows(_machine_rows(platform), sys.stdout), sep="\n")
    print()
    print(styled("What omniloom uses", "1", sys.stdout))
    print(*show_rows(_choice_rows(choices), sys.stdout), sep="\n")
    print()
    device = _own_name(choices["device"]["value"], next(iter(methods.values())))
    print(styled(f"Quantization methods on {device}", "1", sys.stdout))
    print(*show_rows(_method_rows(methods, device), sys.stdout), sep="\n")


def _machine_rows(platform: Platform) -> list[tuple[str, str]]:
    cpu, memory = platform.cpu, platform.memory
    limit = f", limited to {show_bytes(memory.limit)}" if memory.limit is not None else ""
    quota = f", quota {cpu.quota:g} CPUs" if cpu.quota else ""
    rows = [
        ("system", f"{platform.os}, {platform.python}"),
        ("libraries", ", ".join(f"{name} {version}" for name, version in platform.libraries.items())),
        ("cpu", f"{cpu.name}, {cpu.physical} cores, {cpu.logical} logical, {cpu.threads} usable{quota}"),
        ("features", " ".join(cpu.features) or "none that matter"),
        ("memory", f"{show_bytes(memory.total)}{limit}, {show_bytes(memory.usable)} usable now"),
    ]
    for device in platform.devices or ():
        rows.append((device.id, _device_line(device)))
    if not platform.devices:
        rows.append(("devices", "no accelerator"))
    return rows


def _device_line(device: Any) -> str:
    precisions = [name for name, there in (("bfloat16", device.bf16), ("float8", device.fp8)) if there]
    capability = f" ({device.capability})" if device.capability else ""
    free = f"{show_bytes(device.free_bytes)} of {show_bytes(device.total_bytes)} free"
    return f"{device.name}{capability}, {device.backend}, {free}, native: {', '.join(precisions) or 'float16, float32'}"


def _choice_rows(choices: dict[str, dict[str, str]]) -> list[tuple[str, str]]:
    return [(name, f"{choice['value']}: {choice['reason']}") for name, choice in choices.items()]


def _own_name(device: str, listed: dict[str, Any]) -> str:
    """Return the name that the table of methods has for a device: that of the first of its kind."""
    kind = device.partition(":")[0]
    return device if device in listed else next((name for name in listed if name.partition(":")[0] == kind), "cpu")


def _method_rows(methods: dict[str, dict[str, Any]], device: str) -> list[tuple[str, str]]:
    rows = []
    for name, devices in methods.items():
        cell = devices[device]
        how = f"{cell['status']} ({cell['kernel']})" if cell["kernel"] else cell["status"]
        rows.append((name, f"{how}: {cell['reason']}" if cell["reason"] else how))
    return rows
