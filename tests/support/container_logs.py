"""A container that no test starts, what its probe prints, and messages of pyxis."""

import json
from pathlib import Path
from typing import Any

import hpcdist
from hpcdist.containers.spec import ContainerSpec
from hpcdist.host.versions import VERSIONS_MARK, source_digest

SPEC = ContainerSpec(runtime="apptainer", image="/i/hpcdist.sif", workdir=Path("/p"))
FACTS = {
    "hpcdist": hpcdist.__version__,
    "source": source_digest(str(Path(hpcdist.__file__).parent)),
    "python": "3.12.3",
    "torch": "2.15.0",
    "cuda": "13.2",
}


def probe_output(**changes: Any) -> str:
    """Return the line that the probe prints in an image; None removes a fact."""
    facts = {key: value for key, value in (FACTS | changes).items() if value is not None}
    return f"{VERSIONS_MARK} {json.dumps(facts)}"


#: Messages of pyxis, from its source (0.24); srun prints progress, slurmstepd prints errors.
PYXIS_PROGRESS = "pyxis: importing docker image: nvcr.io#a/b:1\npyxis: imported docker image: nvcr.io#a/b:1\n"
PYXIS_LOG = """\
slurmstepd: error: pyxis: child 77 failed with error code: 1
slurmstepd: error: pyxis: failed to create container filesystem
slurmstepd: error: pyxis: printing enroot log file:
slurmstepd: error: pyxis:     [ERROR] No such file
slurmstepd: error: pyxis: couldn't start container
slurmstepd: error: Failed to invoke spank plugin stack
"""
#: Logs of tasks with pyxis 0.24 on Slurm 22.05, of several slurmds on one machine.
PYXIS_MOUNT_LOG = """\
slurmstepd-n1: error: pyxis: --container-mounts: source path does not exist: /nowhere
slurmstepd-n1: error: pyxis: printing enroot log file:
slurmstepd-n1: error: pyxis:     [INFO] Extracting squashfs filesystem...
slurmstepd-n1: error: pyxis: container was not started successfully by another task
slurmstepd-n1: error: Failed to invoke spank plugin stack
"""
PYXIS_CORRUPT_LOG = """\
slurmstepd-n2: error: pyxis: child 990 failed with error code: 1
slurmstepd-n2: error: pyxis: printing enroot log file:
slurmstepd-n2: error: pyxis:     [INFO] Extracting squashfs filesystem...
slurmstepd-n2: error: pyxis:     FATAL ERROR: File system corruption detected
slurmstepd-n2: error: *** STEP 3.0 ON n2 CANCELLED AT 2026-11-22T16:08:09 ***
slurmstepd-n2: error: pyxis: child 1033 failed with error code: 1
"""
#: The image has device files, which an ordinary user cannot unpack.
PYXIS_DEVICES_LOG = """\
slurmstepd: error: pyxis: child 990 failed with error code: 2
slurmstepd: error: pyxis: printing enroot log file:
slurmstepd: error: pyxis:     create_inode: could not create character device /d/dev/null, because you're not superuser!
slurmstepd: error: pyxis:     created 2 hardlinks
slurmstepd: error: Failed to invoke spank plugin stack
"""
PYXIS_OTHER_TASK_LOG = """\
slurmstepd-n2: error: pyxis: container was not started successfully by another task
slurmstepd-n2: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1
slurmstepd-n2: error: Failed to invoke spank plugin stack
"""
