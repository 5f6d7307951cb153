"""Choosing the scheduler by name with options: ``"unipc"``, ``{"name": "dpm++", "solver_order": 3}``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from omniloom.config import register
from omniloom.errors import ConfigError, suggest
from omniloom.pipelines.family import Family

# short name -> (class for noise-prediction models, class for flow-matching models)
_NAMES = {
    "euler": ("EulerDiscreteScheduler", "FlowMatchEulerDiscreteScheduler"),
    "heun": ("HeunDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"),
    "lcm": ("LCMScheduler", "FlowMatchLCMScheduler"),
    "unipc": ("UniPCMultistepScheduler", "UniPCMultistepScheduler"),
    "dpm++": ("DPMSolverMultistepScheduler", "DPMSolverMultistepScheduler"),
    "deis": ("DEISMultistepScheduler", "DEISMultistepScheduler"),
    "ddim": ("DDIMScheduler", None),
}


def _parse(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return dict(value)
    raise ValueError(f"give a name ({', '.join(_NAMES)} or a diffusers class) or a mapping with 'name' and options")


register("scheduler", default=None, parse=_parse, help="Scheduler by name, or a mapping of 'name' and its options.")


def choose_scheduler(base: Any, wanted: Mapping[str, Any] | None, family: Family) -> Any:
    """Return a scheduler as ``wanted``, its other settings taken from ``base``; ``base`` itself if nothing is wanted.

    Raises ``ConfigError`` for an unknown name or option, or a scheduler that the pipeline cannot drive.
    """
    if not wanted:
        return base
    options = dict(wanted)
    flow = type(base).__name__.startswith("FlowMatch") or bool(base.config.get("use_flow_sigmas"))
    cls = _class_of(options.pop("name", type(base).__name__), flow)
    accepted = set(inspect.signature(cls.__init__).parameters) - {"self"}
    for key in options:
        if key not in accepted:
            allowed = ", ".join(sorted(accepted))
            raise ConfigError(f"{cls.__name__} has no option {key!r}{suggest(key, accepted)} (allowed: {allowed})")
    taken = set(inspect.signature(cls.set_timesteps).parameters)
    if missing := [arg for arg in family.schedule_args if arg not in taken]:
        raise ConfigError(
            f"{cls.__name__} cannot be used with this model: its set_timesteps takes no {', '.join(missing)}"
        )
    if flow and "use_flow_sigmas" in accepted:  # a general solver has to be told that the model predicts velocities
        inherited = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
        if "shift" in base.config and "flow_shift" in accepted:
            inherited["flow_shift"] = base.config["shift"]
        options = {**inherited, **options}
    try:
        return cls.from_config(base.config, **options)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"{cls.__name__} refuses its options: {' '.join(str(error).split())}") from error


def _class_of(name: Any, flow: bool) -> Any:
    import diffusers

    if not isinstance(name, str):
        raise ConfigError(f"scheduler name {name!r}: must be a string")
    full = _NAMES[name.lower()][1 if flow else 0] if name.lower() in _NAMES else name
    if full is None:
        raise ConfigError(f"scheduler {name!r} cannot drive a flow-matching model; try one of: euler, unipc, dpm++")
    cls = getattr(diffusers, full, None)
    if not (isinstance(cls, type) and issubclass(cls, diffusers.SchedulerMixin)):
        known = [*_NAMES, *(n for n in dir(diffusers) if n.endswith("Scheduler"))]
        raise ConfigError(
            f"unknown scheduler {name!r}{suggest(name, known)} (allowed: {', '.join(_NAMES)} or a diffusers class)"
        )
    return cls
