"""Running one request: an unmodified pipeline over a clone, from the first token to the last pixel."""

from __future__ import annotations

import time
import traceback
from typing import Any

import torch

from omniloom.diffusion.hooks.state import release
from omniloom.engine.output import Output, Progress
from omniloom.engine.request import Request
from omniloom.engine.rng import own_global_rng
from omniloom.engine.trace import Trace
from omniloom.errors import EngineError, MemoryLimitError, OmniloomError, RequestError
from omniloom.pipelines.clone import CloneFactory
from omniloom.pipelines.construct import GATE


def run_request(request: Request, clones: CloneFactory, device: str) -> Output:
    """Run ``request`` on the calling thread. Whatever goes wrong is in ``Output.error``; nothing is shared or kept."""
    try:
        output = _run(request, clones, device)
    finally:
        release(request.id)  # whatever hooks keep for this request
    if output.error is not None:
        _let_go(output.error)
    return output


def _run(request: Request, clones: CloneFactory, device: str) -> Output:
    call = request.call
    if call is None:
        raise ValueError("a refused request cannot run")
    start = time.perf_counter()
    output = Output(
        request.id,
        prompt=request.prompt,
        seeds=list(call.seeds),
        params=dict(call.resolved),
        warnings=list(call.warnings),
    )
    trace = Trace(request.id, request.cancelled, request.notify, device, clones.branches)
    try:
        with GATE.running(), torch.no_grad():
            trace.check()
            pipe = clones.clone(call.prototype, trace.calls, batch=len(call.seeds))
            if call.guidance is not None:
                pipe.guider = pipe.guider.new(guidance_scale=call.guidance)
            if clones.global_rng:
                trace.encoding.enter_context(own_global_rng(trace.check))
            trace.attach(pipe)
            arguments = dict(call.arguments)
            generators = call.generators()
            arguments["generator"] = generators if len(generators) > 1 else generators[0]
            result = pipe(**arguments, output_type=call.output_type)
            trace.check()
        _collect(output, result, call.output_type)
    except OmniloomError as error:
        output.error = error
    except Exception as error:
        output.error = _translate(error, request.id)
    trace.finish()
    output.metrics = trace.metrics()
    output.metrics["seconds_queued"] = start - request.arrival
    output.metrics["seconds_total"] = time.perf_counter() - start
    request.notify(Progress(request.id, "done", trace.steps, trace.total))
    return output


def _collect(output: Output, result: Any, output_type: str) -> None:
    """Put the pipeline's result into the field it belongs to."""
    for source in ("images", "frames", "audios", "audio"):
        value = getattr(result, source, None)
        if value is None:
            continue
        if output_type == "latent" and source in ("images", "frames"):
            output.latents = value
        else:
            setattr(output, "audio" if source.startswith("audio") else source, value)
        return
    raise EngineError(f"{type(result).__name__} holds neither images, frames nor audio")


def _translate(error: Exception, request_id: str) -> OmniloomError:
    """Turn an exception of a library into one of ours, with the original as its cause."""
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in message:
        ours: OmniloomError = MemoryLimitError(
            f"request {request_id} ran out of memory: {message}; try a smaller size or VAE tiling"
        )
    elif isinstance(error, (ValueError, TypeError)) and _in_input_check(error):
        ours = RequestError(message)
    else:
        ours = EngineError(f"request {request_id} failed: {type(error).__name__}: {message}")
    ours.__cause__ = error
    return ours


def _let_go(error: OmniloomError) -> None:
    """Turn the tracebacks of an error's chain into a note: their frames would keep weights and latents alive."""
    if error.__cause__ is not None:
        error.add_note("".join(traceback.format_exception(error.__cause__)).rstrip())
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__


def _in_input_check(error: Exception) -> bool:
    """Whether the exception came from the pipeline's own check of its inputs, and so is the caller's to mend."""
    return any(frame.name == "check_inputs" for frame in traceback.extract_tb(error.__traceback__))
