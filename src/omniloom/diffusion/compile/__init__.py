"""Compilation that composes with hooks and cannot lose a request.

regionally_compile(model, dynamic=True)         # arguments go to torch.compile as they are
compile_model(model, CompilePolicy("full"))     # the same with a granularity, a budget and strictness
print(compile_report(model))
uncompile(model)
"""

import torch as torch

from omniloom.diffusion.compile.compiled import Compiled
from omniloom.diffusion.compile.policy import CompilePolicy, Granularity
from omniloom.diffusion.compile.record import ClassRecord
from omniloom.diffusion.compile.regional import compile_model, compile_report, regionally_compile, uncompile
from omniloom.diffusion.compile.warmup import Bucket, WarmUp, warm_up

__all__ = [
    "Bucket",
    "ClassRecord",
    "CompilePolicy",
    "Compiled",
    "Granularity",
    "WarmUp",
    "compile_model",
    "compile_report",
    "regionally_compile",
    "uncompile",
    "warm_up",
]
