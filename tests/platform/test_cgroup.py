from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniloom.platform.cgroup import cpu_quota, memory_limit, usable_cpus
from tests.platform import trees

GIB = 2**30
NO_LIMIT_V1 = 9223372036854771712


def test_no_cgroups_no_limit(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None
    assert cpu_quota(tmp_path) is None


def test_v2_tightest_level_wins(tmp_path: Path) -> None:
    levels = {
        "": {},
        "pod": {"memory.max": 4 * GIB, "memory.current": 3 * GIB, "memory.stat": "anon 5\ninactive_file 1073741824\n"},
        "pod/box": {"memory.max": 8 * GIB, "memory.current": 1 * GIB},
    }
    found = memory_limit(trees.write(tmp_path, trees.v2("/pod/box", levels)))
    assert found is not None
    assert found.limit == 4 * GIB
    assert found.available == 2 * GIB  # 4 - 3 + 1 of file cache that gives way


def test_v2_max_is_no_limit(tmp_path: Path) -> None:
    levels = {"a": {"memory.max": "max\n", "memory.current": 5}, "a/b": {"memory.max": "max\n"}}
    assert memory_limit(trees.write(tmp_path, trees.v2("/a/b", levels))) is None


def test_v2_limit_and_available_may_come_from_different_levels(tmp_path: Path) -> None:
    levels = {
        "a": {"memory.max": 10 * GIB, "memory.current": 10 * GIB},
        "a/b": {"memory.max": 2 * GIB, "memory.current": GIB},
    }
    found = memory_limit(trees.write(tmp_path, trees.v2("/a/b", levels)))
    assert found is not None and (found.limit, found.available) == (2 * GIB, 0)


def test_v2_missing_usage_counts_as_unused(tmp_path: Path) -> None:
    found = memory_limit(trees.write(tmp_path, trees.v2("/a", {"a": {"memory.max": 3 * GIB}})))
    assert found is not None and found.available == 3 * GIB


def test_v2_container_mount_shows_the_groups_own_folder(tmp_path: Path) -> None:
    files = trees.v2("/docker/abc", {"": {"memory.max": 2 * GIB, "memory.current": GIB}}, shown="/docker/abc")
    found = memory_limit(trees.write(tmp_path, files))
    assert found is not None and found.limit == 2 * GIB


def test_v2_group_outside_of_the_mount_falls_back_to_the_mount(tmp_path: Path) -> None:
    files = trees.v2("/../other", {"": {"memory.max": 2 * GIB}}, shown="/docker/abc")
    found = memory_limit(trees.write(tmp_path, files))
    assert found is not None and found.limit == 2 * GIB


def test_v2_without_mountinfo_uses_the_usual_place(tmp_path: Path) -> None:
    files = trees.v2("/a", {"a": {"memory.max": GIB}})
    del files["proc/self/mountinfo"]
    found = memory_limit(trees.write(tmp_path, files))
    assert found is not None and found.limit == GIB


def test_v1_limit(tmp_path: Path) -> None:
    levels = {
        "": {"memory.limit_in_bytes": NO_LIMIT_V1, "memory.usage_in_bytes": 20 * GIB},
        "box": {
            "memory.limit_in_bytes": 6 * GIB,
            "memory.usage_in_bytes": 2 * GIB,
            "memory.stat": "inactive_file 1\ntotal_inactive_file 1073741824\n",
        },
    }
    found = memory_limit(trees.write(tmp_path, trees.v1("/box", levels)))
    assert found is not None and (found.limit, found.available) == (6 * GIB, 5 * GIB)


def test_v1_largest_number_is_no_limit(tmp_path: Path) -> None:
    levels = {"": {"memory.limit_in_bytes": NO_LIMIT_V1, "memory.usage_in_bytes": 20 * GIB}}
    assert memory_limit(trees.write(tmp_path, trees.v1("/", levels))) is None


def test_v1_and_v2_together(tmp_path: Path) -> None:
    """systemd's hybrid mode: controllers in v1, an empty v2 beside them."""
    one, two = (
        trees.v1("/box", {"box": {"memory.limit_in_bytes": GIB}}),
        trees.v2("/box", {"box": {"memory.max": 2 * GIB}}),
    )
    both = {**one, **two}
    for name in ("proc/self/cgroup", "proc/self/mountinfo"):
        both[name] = f"{one[name]}{two[name]}"
    found = memory_limit(trees.write(tmp_path, both))
    assert found is not None and found.limit == GIB


def test_mount_point_with_a_blank(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": trees.mount(r"/odd\040place", "cgroup2"),
        "odd place/memory.max": GIB,
    }
    found = memory_limit(trees.write(tmp_path, files))
    assert found is not None and found.limit == GIB


@pytest.mark.parametrize(
    ("text", "expected"),
    [("max 100000\n", None), ("150000 100000\n", 1.5), ("50000\n", 0.5), ("0 0\n", None), ("junk\n", None), ("", None)],
)
def test_v2_cpu_quota(tmp_path: Path, text: str, expected: float | None) -> None:
    assert cpu_quota(trees.write(tmp_path, trees.v2("/a", {"a": {"cpu.max": text}}))) == expected


def test_cpu_quota_of_a_parent_counts(tmp_path: Path) -> None:
    levels = {"a": {"cpu.max": "200000 100000\n"}, "a/b": {"cpu.max": "max 100000\n"}}
    assert cpu_quota(trees.write(tmp_path, trees.v2("/a/b", levels))) == 2.0


@pytest.mark.parametrize(("quota", "expected"), [(-1, None), (250_000, 2.5), (0, None)])
def test_v1_cpu_quota(tmp_path: Path, quota: int, expected: float | None) -> None:
    levels = {"a": {"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": 100_000}}
    assert cpu_quota(trees.write(tmp_path, trees.v1("/a", levels, controller="cpu"))) == expected


@given(
    limits=st.lists(st.one_of(st.just("max"), st.integers(0, 2**40)), min_size=1, max_size=6),
    usage=st.integers(0, 2**41),
)
def test_any_nesting_gives_the_smallest_limit(limits: list[int | str], usage: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        names = ["/".join("abcdef"[: depth + 1]) for depth in range(len(limits))]
        levels = {n: {"memory.max": v, "memory.current": usage} for n, v in zip(names, limits, strict=True)}
        found = memory_limit(trees.write(Path(folder), trees.v2(f"/{names[-1]}", levels)))
    numbers = [limit for limit in limits if isinstance(limit, int)]
    if not numbers:
        assert found is None
    else:
        assert found is not None
        assert found.limit == min(numbers)
        assert found.available == max(0, min(numbers) - usage)


@given(text=st.binary(max_size=200))
def test_broken_proc_files_never_raise(text: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("proc/self/cgroup", "proc/self/mountinfo", "sys/fs/cgroup/memory.max", "sys/fs/cgroup/cpu.max"):
            trees.write(root, {name: ""})
            (root / name).write_bytes(text)
        memory_limit(root)
        cpu_quota(root)


@given(affinity=st.integers(1, 512), quota=st.one_of(st.none(), st.floats(0.001, 1000)))
def test_usable_cpus_within_bounds(affinity: int, quota: float | None) -> None:
    cpus = usable_cpus(affinity, quota)
    assert 1 <= cpus <= affinity
    if quota is not None:
        assert cpus < quota + 1
