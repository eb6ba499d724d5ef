"""The temporary folders of exports: a killed export's is removed by the next one, a running one's never."""

import os
import signal
from pathlib import Path

from ds_trainer.deploy.export_folder import _folder_aside


def test_the_folder_of_a_killed_export_is_removed_by_the_next_one(tmp_path: Path) -> None:
    """Nothing else can remove it, and it may hold gigabytes; that of an export that still runs stays."""
    output = tmp_path / "model"
    if not (child := os.fork()):
        with _folder_aside(output) as aside:
            (aside / "made" / "model.safetensors").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    (killed,) = tmp_path.iterdir()
    with _folder_aside(output) as running:
        assert not killed.exists()
        with _folder_aside(output) as other:
            assert {*tmp_path.iterdir()} == {running, other}
    assert not any(tmp_path.iterdir())
