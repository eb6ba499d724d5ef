"""What a rank does before it meets the others."""

from __future__ import annotations

from ds_trainer.distributed import building_kernels


def test_the_lock_of_a_killed_compiler_is_removed_and_that_of_a_living_one_is_not(tmp_path, monkeypatch):
    """torch waits for a lock for ever; whoever may compile holds another, which goes with the process, or once done."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    with building_kernels():
        assert not lock.exists()
        lock.touch()
        with building_kernels():  # the outer one may be at it
            assert lock.exists()
    with building_kernels():  # a run that only trains is no reason to keep it
        assert not lock.exists()


def test_the_default_folder_is_the_same_where_a_variable_names_it(tmp_path, monkeypatch):
    """A process that finds it by the variable leaves the locks of one that finds it by default."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    with building_kernels():
        lock = next(tmp_path.glob("torch_extensions/*/ds_trainer")).with_name("deepspeed_shm_comm") / "lock"
        lock.parent.mkdir()
        lock.touch()
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(lock.parent.parent))
        with building_kernels():
            assert lock.exists()


def test_a_folder_that_cannot_be_written_is_deepspeeds_concern(monkeypatch):
    """What is done inside is done, whatever became of the lock."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/proc/nowhere")
    done = []
    with building_kernels():
        done.append(True)
    assert done
