"""``Omni``: load a model, generate with it, see what happened."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from omniloom import options as _options  # noqa: F401  (registers the options)
from omniloom._version import __version__
from omniloom.config import RuntimeConfig
from omniloom.engine.call import folder_defaults, prepare_call
from omniloom.engine.engine import Engine
from omniloom.engine.output import Output, Progress
from omniloom.engine.params import SamplingParams
from omniloom.engine.prompt import parse_prompt
from omniloom.engine.request import Handle
from omniloom.engine.warm import warm_engine
from omniloom.errors import EngineError, OmniloomError, QueueFullError
from omniloom.pipelines.build import LoadedPipeline
from omniloom.pipelines.compiling import compilation_report
from omniloom.pipelines.load import LoadProgress, adopt_pipeline, load_pipeline
from omniloom.pipelines.quantizing import quantization_report
from omniloom.pipelines.tasks import supported_tasks
from omniloom.platform import detect
from omniloom.report import Report, component_report

ProgressCallback = Callable[[Progress], Any]
_QUEUE_POLL_SECONDS = 0.02


class Omni:
    """A loaded model.

        with Omni("demo") as omni:
            [out] = omni.generate("a fox on blue", SamplingParams(seed=7))
            out.images[0].save("fox.png")

    ``model``: a diffusers pipeline folder, a hub id (``owner/name``), ``"demo"``, or a ``.safetensors`` file of a
    transformer together with ``base``. ``options``: any registered option (``dtype``, ``device``, ``scheduler``,
    ``vae={"tiling": True}``, ``engine={"workers": 4}`` …; ``omniloom.config.options()`` lists them). ``config``:
    options that are resolved already. ``on_load(component, bytes_done, bytes_total)`` is called while weights are read.
    ``expecting``: requests (prompt, parameters) to be checked against the model before its weights are read.

    ``defaults``: the sampling parameters that the model brings; ``tasks``: what it can do; ``report``: what was loaded.

    Raises ``ConfigError`` for a wrong option, ``ModelError`` or ``CheckpointError`` for a model that cannot be loaded,
    ``MemoryLimitError`` for one that does not fit. Nothing is kept if it fails.
    """

    def __init__(
        self,
        model: str | Path = "demo",
        *,
        config: RuntimeConfig | None = None,
        on_load: LoadProgress | None = None,
        expecting: Iterable[tuple[Any, SamplingParams]] = (),
        **options: Any,
    ) -> None:
        self.config = RuntimeConfig.resolve(config=_given(config), python=options)

        def check(loaded: LoadedPipeline) -> None:
            folder_defaults(loaded)
            for prompt, params in expecting:
                prepare_call(loaded, parse_prompt(prompt), params)

        loaded, plan = load_pipeline(model, self.config, on_load, check)
        self._start(loaded, plan.device, {"model": str(model), "plan": plan.to_dict()})

    @classmethod
    def from_pipeline(cls, pipe: Any, **options: Any) -> Omni:
        """Adopt an existing diffusers pipeline object. It stays as it is, and may be used on, but not meanwhile."""
        self = cls.__new__(cls)
        self.config = RuntimeConfig.resolve(python=options)
        loaded, plan = adopt_pipeline(pipe, self.config)
        self._start(loaded, plan.device, {"model": f"{type(pipe).__name__} object", "plan": plan.to_dict()})
        return self

    def _start(self, loaded: LoadedPipeline, device: str, parts: Mapping[str, Any]) -> None:
        self._engine = Engine(loaded, self.config.engine, device)
        try:
            warmed = warm_engine(self._engine, loaded, self.config.compile.warmup)
        except BaseException:
            self._engine.close()
            loaded.take_back()
            raise
        self.defaults = folder_defaults(loaded)
        self.tasks = supported_tasks(loaded)
        self._loaded: LoadedPipeline | None = loaded
        states = self._engine.call_states
        self.report = Report(
            version=__version__,
            **parts,
            pipeline=type(loaded.pipe).__name__,
            family=loaded.family.name,
            tasks=self.tasks,
            components={
                name: component_report(
                    value,
                    loaded.load_seconds.get(name),
                    states.get(name),
                    quantization_report(value, loaded.quantization.get(name)),
                )
                for name, value in loaded.pipe.components.items()
                if value is not None
            },
            config=self.config.to_dict(),
            platform=detect().to_dict(),
        )
        if self.config.compile.granularity != "none":
            self.report.add("compile", functools.partial(compilation_report, loaded))
        if warmed:
            self.report.add("compile_warmup", warmed)

    def generate(
        self,
        prompts: str | Mapping[str, Any] | list[Any],
        params: SamplingParams | None = None,
        *,
        on_progress: ProgressCallback | None = None,
    ) -> list[Output]:
        """Generate and wait. One output per prompt, in order.

        ``prompts``: a string, a dict (``prompt``, ``negative_prompt``, ``image`` or ``images``, ``mask`` …), or a list
        of these. A single prompt raises its error; in a list each request fails alone and its output has ``error`` set,
        except that a wrong parameter that all share is raised at once.
        """
        if not isinstance(prompts, (list, tuple)):
            handle = self.submit(prompts, params, on_progress=on_progress)
            output = self._wait(handle)
            if output.error is not None:
                raise output.error
            return [output]
        return [output for _, output in sorted(self._run(prompts, params, on_progress), key=lambda pair: pair[0])]

    def stream(
        self,
        prompts: Iterable[Any],
        params: SamplingParams | None = None,
        *,
        on_progress: ProgressCallback | None = None,
    ) -> Iterator[Output]:
        """Yield outputs as they end. Closing the iterator early cancels what is still running."""
        if isinstance(prompts, (str, Mapping)):
            prompts = [prompts]
        for _, output in self._run(prompts, params, on_progress):
            yield output

    async def agenerate(
        self, prompts: Any, params: SamplingParams | None = None, *, on_progress: ProgressCallback | None = None
    ) -> list[Output]:
        """Like ``generate``, for asyncio. Cancelling the task cancels the requests."""
        single = not isinstance(prompts, (list, tuple))
        handles: list[Handle] = []
        try:
            for prompt in [prompts] if single else prompts:
                handles.append(await self._submit_later(prompt, params, on_progress, raising=single))
            outputs = await asyncio.gather(*(asyncio.wrap_future(handle.future) for handle in handles))
        finally:
            for handle in handles:
                handle.cancel()  # nothing where they have ended
        if single and outputs[0].error is not None:
            raise outputs[0].error
        return outputs

    async def astream(
        self,
        prompts: Iterable[Any],
        params: SamplingParams | None = None,
        *,
        on_progress: ProgressCallback | None = None,
    ) -> AsyncIterator[Output]:
        """Like ``stream``, for asyncio."""
        handles: list[Handle] = []
        try:
            for prompt in prompts:
                handles.append(await self._submit_later(prompt, params, on_progress, raising=False))
            for done in asyncio.as_completed([asyncio.wrap_future(handle.future) for handle in handles]):
                yield await done
        finally:
            for handle in handles:
                handle.cancel()

    def submit(
        self, prompt: Any, params: SamplingParams | None = None, *, on_progress: ProgressCallback | None = None
    ) -> Handle:
        """Queue one request and return its handle (``result()``, ``cancel()``). Raises ``RequestError`` at once."""
        return self._engine.submit(prompt, params, on_progress=on_progress)

    def unload(self) -> None:
        """Cancel what runs, end the workers and let go of the weights. A second call does nothing."""
        self._engine.close()
        if self._loaded is not None:
            self.report.freeze()
            self._loaded.take_back()
            self._loaded = None

    @property
    def _pipe(self) -> Any:
        return self._loaded.pipe if self._loaded is not None else None

    def __enter__(self) -> Omni:
        return self

    def __exit__(self, *_: object) -> None:
        self.unload()

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.abandon()

    def _run(
        self, prompts: Iterable[Any], params: SamplingParams | None, on_progress: ProgressCallback | None
    ) -> Iterator[tuple[int, Output]]:
        """Yield (index, output) as they end, with no more waiting at a time than the workers can soon take."""
        waiting: dict[concurrent.futures.Future[Output], tuple[int, Handle]] = {}
        numbered = iter(enumerate(prompts))
        ahead = 2 * self.config.engine.workers
        try:
            while True:
                for index, prompt in itertools.islice(numbered, max(0, ahead - len(waiting))):
                    handle = self._submit_or_failed(prompt, params, on_progress)
                    waiting[handle.future] = (index, handle)
                if not waiting:
                    return
                done, _ = concurrent.futures.wait(waiting, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in done:
                    yield waiting.pop(future)[0], future.result()
        finally:
            for _, handle in waiting.values():
                handle.cancel()

    def _submit_or_failed(
        self,
        prompt: Any,
        params: SamplingParams | None,
        on_progress: ProgressCallback | None,
        *,
        raising: bool = False,
        block: bool = True,
    ) -> Handle:
        """Submit; a request that is refused becomes a handle that has failed already, unless ``raising``."""
        try:
            return self._engine.submit(prompt, params, on_progress=on_progress, block=block)
        except EngineError:
            raise
        except OmniloomError as error:
            if raising:
                raise
            return self._engine.failed(prompt, error)

    async def _submit_later(
        self, prompt: Any, params: SamplingParams | None, on_progress: ProgressCallback | None, *, raising: bool
    ) -> Handle:
        """Submit as soon as there is a place, without holding up the event loop."""
        while True:
            try:
                return self._submit_or_failed(prompt, params, on_progress, raising=raising, block=False)
            except QueueFullError:
                await asyncio.sleep(_QUEUE_POLL_SECONDS)

    def _wait(self, handle: Handle) -> Output:
        try:
            return handle.result()
        except BaseException:  # KeyboardInterrupt: stop the request before the caller goes on
            handle.cancel()
            raise


def _given(config: RuntimeConfig | None) -> dict[str, Any]:
    return {} if config is None else {key: config[key] for key in config if config.source(key) != "default"}
