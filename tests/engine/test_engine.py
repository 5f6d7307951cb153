"""The engine: failing alone, cancelling, streaming, asyncio, closing, and what the outputs tell."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref

import pytest
import torch

from omniloom import Omni, SamplingParams
from omniloom.errors import Cancelled, ConfigError, EngineError, MemoryLimitError, QueueFullError, RequestError
from tests.fixtures.reference import load

QUICK = SamplingParams(num_inference_steps=2, seed=1, height=32, width=32, max_sequence_length=16)
LONG = SamplingParams(num_inference_steps=5000, seed=1, height=32, width=32, max_sequence_length=16)


@pytest.fixture(scope="module")
def omni(tiny_folder):
    with Omni(tiny_folder("flux"), dtype="float32", device="cpu", engine={"workers": 2}) as omni:
        yield omni


def test_a_failing_request_fails_alone(omni: Omni) -> None:
    prompts = ["a fox", "", {"prompt": "a cat", "colour": "red"}, {"prompt": "a dog"}, 7]
    good, empty, unknown, also_good, number = omni.generate(prompts, QUICK)
    assert good.ok and also_good.ok
    assert len(good.images) == 1 and good.prompt == "a fox"
    for output in (empty, unknown, number):
        assert isinstance(output.error, RequestError)
        assert output.images is None
    assert "colour" in str(unknown.error)
    with pytest.raises(RequestError, match="empty"):
        omni.generate("   ", QUICK)


def test_output_says_everything(omni: Omni) -> None:
    [out] = omni.generate({"prompt": "a fox", "negative_prompt": "blurry"}, QUICK)
    assert out.params["num_inference_steps"] == 2
    assert out.params["negative_prompt"] == "blurry"
    assert out.params["seed"] == 1
    assert (out.params["height"], out.params["width"]) == out.images[0].size[::-1] == (32, 32)
    assert set(out.metrics["seconds"]) == {"encode", "denoise", "decode"}
    assert all(value > 0 for value in out.metrics["peak_memory_bytes"].values())
    assert out.metrics["steps"] == 2
    assert sum(out.metrics["seconds"].values()) <= out.metrics["seconds_total"] + 0.01


def test_default_size_is_resolved(omni: Omni) -> None:
    [out] = omni.generate("a fox", SamplingParams(num_inference_steps=1, seed=1, max_sequence_length=16))
    assert (out.params["width"], out.params["height"]) == out.images[0].size


def test_progress_events_come_in_order(omni: Omni) -> None:
    events = []
    omni.generate("a fox", QUICK, on_progress=events.append)
    assert [e.phase for e in events] == ["queued", "encode", "denoise", "denoise", "denoise", "decode", "done"]
    assert [(e.step, e.total) for e in events if e.phase == "denoise"] == [(0, 2), (1, 2), (2, 2)]


def test_a_failing_progress_callback_fails_nothing(omni: Omni) -> None:
    def broken(_progress: object) -> None:
        raise RuntimeError("my bar broke")

    assert omni.generate("a fox", QUICK, on_progress=broken)[0].ok


def test_cancel_while_queued_running_and_after(omni: Omni) -> None:
    events: list[tuple[str, int]] = []
    started = threading.Event()

    def watch(progress) -> None:
        events.append((progress.phase, progress.step))
        if progress.step == 3:
            started.set()

    running = omni.submit("a fox", LONG, on_progress=watch)
    blockers = [omni.submit("a cat", LONG) for _ in range(3)]
    assert started.wait(60)
    running.cancel()
    at_cancel = max(step for _, step in events)
    for handle in blockers:
        handle.cancel()
    outputs = [handle.result(60) for handle in (running, *blockers)]
    assert all(isinstance(output.error, Cancelled) for output in outputs)
    assert at_cancel <= outputs[0].metrics["steps"] <= at_cancel + 1
    assert "decode" not in outputs[0].metrics["seconds"]
    running.cancel()
    [after] = omni.generate("a fox", QUICK)
    assert after.ok


@pytest.mark.parametrize("phase", ["encode", "denoise", "decode"])
def test_cancel_in_each_phase_leaves_the_next_request_exact(tiny_folder, phase: str) -> None:
    with Omni(tiny_folder("sd3"), dtype="float32", device="cpu") as omni:
        params = SamplingParams(
            num_inference_steps=3, seed=9, height=32, width=32, output_type="np", max_sequence_length=16
        )
        [expected] = omni.generate("a fox", params)
        holder: list = []
        ready = threading.Event()

        def stop(progress) -> None:
            if progress.phase == phase:
                ready.wait(10)
                holder[0].cancel()

        holder.append(omni.submit("a cat", params, on_progress=stop))
        ready.set()
        assert isinstance(holder[0].result(60).error, Cancelled)
        [again] = omni.generate("a fox", params)
        assert (again.images == expected.images).all()


def test_stream_yields_as_they_end_and_stops_when_closed(omni: Omni) -> None:
    assert sorted(o.prompt for o in omni.stream(["a", "b", "c", "d", "e"], QUICK)) == ["a", "b", "c", "d", "e"]
    stream = omni.stream(["quick"] + ["long"] * 20, LONG)
    closer = threading.Timer(0.3, lambda: None)
    closer.start()
    first = omni.submit("a fox", QUICK)
    stream.close()
    assert first.result(60).ok


def test_asyncio(omni: Omni) -> None:
    async def main() -> None:
        one, two = await omni.agenerate(["a", ""], QUICK)
        assert one.ok and isinstance(two.error, RequestError)
        assert {o.prompt async for o in omni.astream(["x", "y"], QUICK)} == {"x", "y"}
        task = asyncio.create_task(omni.agenerate(["slow"], LONG))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    start = time.perf_counter()
    assert omni.generate("a fox", QUICK)[0].ok
    assert time.perf_counter() - start < 30


def test_errors_of_the_pipeline_are_translated(tiny_folder) -> None:
    pipe = load(tiny_folder("flux"))
    with Omni.from_pipeline(pipe) as omni:
        pipe.vae.decode = lambda *a, **k: (_ for _ in ()).throw(RuntimeError("decoder broke"))
        with pytest.raises(EngineError, match="decoder broke") as caught:
            omni.generate("a fox", QUICK)
        assert isinstance(caught.value.__cause__, RuntimeError)
        pipe.vae.decode = lambda *a, **k: (_ for _ in ()).throw(torch.OutOfMemoryError("no memory"))
        with pytest.raises(MemoryLimitError, match="tiling"):
            omni.generate("a fox", QUICK)
        del pipe.vae.decode
        assert omni.generate("a fox", QUICK)[0].ok


def test_a_full_queue_is_said(tiny_folder) -> None:
    with Omni(tiny_folder("flux"), dtype="float32", device="cpu", engine={"workers": 1, "max_queue": 1}) as omni:
        handles = [omni.submit("a fox", LONG), omni.submit("a fox", LONG)]
        with pytest.raises(QueueFullError, match="max_queue"):
            omni.submit("a fox", LONG)
        for handle in handles:
            handle.cancel()
        assert len(omni.generate(["a fox"] * 5, QUICK)) == 5  # generate waits for a place

        async def main() -> tuple[int, int]:
            beats = 0

            async def heart() -> None:
                nonlocal beats
                while True:
                    beats += 1
                    await asyncio.sleep(0.005)

            heartbeat = asyncio.create_task(heart())
            outputs = await omni.agenerate(["a fox"] * 6, QUICK)
            heartbeat.cancel()
            return len(outputs), beats

        count, beats = asyncio.run(main())
        assert count == 6 and beats > 5  # and never holds up the event loop


def test_unload_cancels_and_frees(tiny_folder) -> None:
    omni = Omni(tiny_folder("flux"), dtype="float32", device="cpu")
    weights = weakref.ref(next(omni._pipe.transformer.parameters()))
    handle = omni.submit("a fox", LONG)
    omni.unload()
    omni.unload()
    assert isinstance(handle.result(1).error, Cancelled)
    with pytest.raises(EngineError, match="unloaded"):
        omni.generate("a fox", QUICK)
    gc.collect()
    assert weights() is None


def test_nothing_of_a_request_is_kept(omni: Omni) -> None:
    [out] = omni.generate(
        "a fox",
        SamplingParams(num_inference_steps=1, height=32, width=32, output_type="latent", max_sequence_length=16),
    )
    latents = weakref.ref(out.latents)
    del out
    gc.collect()
    assert latents() is None


def test_vae_modes_and_schedulers_are_strict(tiny_folder) -> None:
    with Omni(tiny_folder("flux"), device="cpu", vae={"tiling": True, "slicing": True}) as omni:
        assert omni._pipe.vae.use_tiling and omni._pipe.vae.use_slicing
        assert omni.report.to_dict()["config"]["vae"] == {"tiling": True, "slicing": True}
    with pytest.raises(ConfigError, match="did you mean 'tiling'"):
        Omni(tiny_folder("flux"), vae={"tilin": True})
    with pytest.raises(ConfigError, match="did you mean 'dtype'"):
        Omni(tiny_folder("flux"), dtyp="float32")


def test_expected_requests_are_checked_before_weights_are_read(tiny_folder) -> None:
    read: list[str] = []

    def load(**changes: object) -> Omni:
        params = SamplingParams.from_mapping({"height": 32, "width": 32, "num_inference_steps": 1, **changes})
        return Omni(
            tiny_folder("sd3"), device="cpu", on_load=lambda name, *_: read.append(name), expecting=[("a fox", params)]
        )

    for changes, said in (({"height": 33}, "nearest: 32x32"), ({"true_cfg_scale": 2.0}, "takes no true_cfg_scale")):
        with pytest.raises(RequestError, match=said):
            load(**changes)
    with pytest.raises(ConfigError, match="unknown scheduler"):
        Omni(tiny_folder("sd3"), device="cpu", scheduler="nope", on_load=lambda name, *_: read.append(name))
    assert not read
    load().unload()
    assert set(read) == {"transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3"}
