"""The output of `hpcdist devcluster status`."""

from __future__ import annotations

from collections.abc import Iterator

from hpcdist.devcluster.cluster import Status
from hpcdist.devcluster.settings import HOST, Layout


def describe(status: Status, layout: Layout) -> Iterator[str]:
    """Return the lines of the output."""
    settings = status.settings
    if settings is None:
        yield f"no dev cluster in {layout.state}: `hpcdist devcluster up --nodes 4` makes one"
        return
    if status.dead:
        yield f"not running: {', '.join(status.dead)}; `hpcdist devcluster up` starts what is missing"
    if not status.controller_answers:
        yield f"slurmctld does not answer: see {layout.logs}/slurmctld.log"
        return
    yield f"{'node':<6}{'address':<17}{'state':<12}reason"
    for node in status.nodes:
        yield f"{node.name:<6}{node.address:<17}{node.state:<12}{node.reason}"
    gpus = f"{settings.gpus_per_node} fake GPUs"
    yield f"each node claims {settings.cpus_per_node} CPUs, {gpus}, {settings.memory_mb} MiB"
    yield f"processes are tracked and signalled by proctrack/{settings.proctrack}"
    yield (
        f"partitions: main (default), high (preempts jobs of main: they are requeued, GraceTime"
        f" {settings.grace_time_s} s)"
    )
    yield f"the nodes reach this machine as {HOST} ({settings.addresses[HOST]}); logs are in {layout.logs}"
    if settings.runtime != "none":
        image = {"apptainer": "FILE.sif", "docker": "NAME", "pyxis": "FILE.sqsh"}[settings.runtime]
        yield f"containers: submit with container.runtime={settings.runtime} container.image={image}"
    yield "use it:"
    yield f"  export SLURM_CONF={layout.slurm_conf}"
    if settings.runtime != "none":
        yield f"  export PATH={layout.bin}:$PATH"
    if settings.runtime == "docker":
        load = f"srun --nodes={settings.num_nodes} --ntasks-per-node=1 docker load --input FILE.tar"
        yield f"  {load}    # each node has its own images"
    yield f"  srun --nodes={settings.num_nodes} hostname"
