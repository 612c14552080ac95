"""What control groups leave of a machine's memory and cores."""

from pathlib import Path

from model_runtime.host import available_memory, usable_cores


def write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_memory_limit_of_control_groups(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/outer/inner\n")
    assert available_memory(tmp_path, own) > 2**20, "no limit: what the system has"
    write(tmp_path / "outer" / "inner", {"memory.max": "max\n", "memory.current": "5\n"})
    stat = "anon 7\ninactive_file 100\n"
    write(tmp_path / "outer", {"memory.max": "5000\n", "memory.current": "3000\n", "memory.stat": stat})
    assert available_memory(tmp_path, own) == 2100
    own.write_text("4:memory:/job\n3:cpu,cpuacct:/job\n")
    write(tmp_path / "memory" / "job", {"memory.limit_in_bytes": "900\n", "memory.usage_in_bytes": "1000\n"})
    assert available_memory(tmp_path, own) == 0


def test_core_quota_of_control_groups(tmp_path: Path) -> None:
    own = tmp_path / "own"
    assert usable_cores(tmp_path, own) >= 1, "a system without control groups"
    own.write_text("0::/\n")
    write(tmp_path, {"cpu.max": "max 100000\n"})
    unlimited = usable_cores(tmp_path, own)
    write(tmp_path, {"cpu.max": "50000 100000\n"})
    assert usable_cores(tmp_path, own) == 1
    write(tmp_path, {"cpu.max": "99900000 100000\n"})
    assert usable_cores(tmp_path, own) == unlimited
    own.write_text("3:cpu,cpuacct:/job\n")
    write(tmp_path / "cpu" / "job", {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"})
    assert usable_cores(tmp_path, own) == unlimited
