"""Checks of what a run needs at its site: Slurm and how it ends jobs, the folder of runs, and MLflow's store."""

import os
import shlex
import shutil
import sqlite3
import stat
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from http.client import HTTPException
from importlib import metadata
from pathlib import Path

from hpcdist.checks.node_facts import space_checks
from hpcdist.config.redaction import redact_text
from hpcdist.errors import RunFolderError, UserMistake, few, plural, shortened
from hpcdist.host import storage
from hpcdist.host.check_result import Check, Level, failure, note, ok, warning
from hpcdist.host.ownership import require_safe, user_of
from hpcdist.run.folder import DATABASE, own_place
from hpcdist.slurm import client as slurm_client
from hpcdist.slurm.output import Partition, SlurmError, count_nodes, parse_seconds
from hpcdist.tracking.uri import VARIABLES, Credentials, read_credentials, sqlite_path, version_in, web_address

#: Commands that `hpcdist submit` and the supervisor need.
NEEDED = ("sbatch", "srun", "scontrol", "scancel", "squeue", "sinfo")
#: Number of partitions with a line of their own.
SHOWN_PARTITIONS = 12
#: Enough time to save a checkpoint of some gigabytes on an ordinary file system.
_SAVE_S = 30
_START_IT = "check the machine that runs slurmctld: `scontrol ping`, `systemctl status slurmctld`"


@dataclass(frozen=True, kw_only=True)
class SlurmFacts:
    """Slurm as this machine sees it: its commands, its settings and its partitions."""

    missing: tuple[str, ...] = ()  #: commands that are not installed
    settings: dict[str, str] = field(default_factory=dict)  #: `scontrol show config`
    away: str = ""  #: why the controller did not answer
    seconds: float = 0.0  #: time until the controller answered
    partitions: list[Partition] | None = None  #: None if the query failed

    @property
    def reached(self) -> bool:
        """Whether the controller has answered."""
        return bool(self.settings)

    @property
    def proctrack(self) -> str:
        """Name of the plugin that finds the processes of a step, such as `cgroup`; empty if unknown."""
        return self.settings.get("ProctrackType", "").removeprefix("proctrack/")


def read_slurm() -> SlurmFacts:
    """Ask Slurm for its settings and partitions; an unavailable part is missing in the result."""
    missing = tuple(name for name in NEEDED if shutil.which(name) is None)
    if "scontrol" in missing:
        return SlurmFacts(missing=missing)
    begun = time.monotonic()
    try:
        settings = slurm_client.settings()
    except SlurmError as error:
        return SlurmFacts(missing=missing, away=str(error))
    found = SlurmFacts(missing=missing, settings=settings, seconds=time.monotonic() - begun)
    with suppress(SlurmError):
        return replace(found, partitions=slurm_client.partitions())
    return found


def client_checks(found: SlurmFacts, user: str, *, in_container: bool = False) -> list[Check]:
    """Check Slurm's commands, its controller, and its accounting for a user."""
    if found.missing == NEEDED and in_container:
        text = "none in this container, as intended: hpcdist outside the container submits and supervises jobs"
        return [ok("commands", text)]
    if found.missing == NEEDED:
        text = "Slurm is not installed: `hpcdist submit` needs it, `hpcdist run` does not"
        fix = "on a cluster use a login node or `module load slurm`; for a test cluster: `sudo hpcdist devcluster up"
        return [note("commands", text, f"{fix} --install`")]
    checks = []
    if found.missing:
        text = f"{', '.join(found.missing)} not found, other Slurm commands are: `hpcdist submit` would fail"
        fix = "put the folder of Slurm's commands on PATH, or install the package slurm-client"
        checks.append(failure("commands", text, fix))
    if "Could not establish a configuration source" in found.away:  # there is no slurm.conf
        text = "Slurm's commands are installed but not configured: `hpcdist submit` would fail, `hpcdist run` works"
        fix = "on a cluster copy its slurm.conf to /etc/slurm, or set SLURM_CONF (`hpcdist devcluster up` prints"
        checks.append(warning("controller", text, f"{fix} its own)"))
    elif found.away:
        text = f"{found.away}: `hpcdist submit` would fail"
        checks.append(failure("controller", text, f"{_START_IT}; check SLURM_CONF"))
    if not found.reached:
        return checks
    cluster = found.settings.get("ClusterName", "?")
    version = found.settings.get("SLURM_VERSION", "?")
    controller = ok("controller", f"{cluster}, Slurm {version}, answers in {found.seconds:.2g} s")
    return [*checks, controller, _accounting(found.settings, user)]


def _accounting(settings: dict[str, str], user: str) -> Check:
    min_job_age = settings.get("MinJobAge", "300 sec")
    lost = f"a job's end is known only for {min_job_age} (MinJobAge), and `explain` cannot show its memory"
    if not settings.get("AccountingStorageType", "").endswith("/slurmdbd"):
        return note("accounting", f"Slurm keeps none: {lost}")
    try:
        accounts = slurm_client.user_accounts(user, cluster=settings.get("ClusterName", ""))
    except SlurmError as error:
        fix = "if sacct fails as well, slurmdbd or its database is down: contact the administrators"
        return warning("accounting", f"{error}: {lost}", fix)
    if accounts:
        return ok("accounting", f"{user} may use {few(accounts)} (cluster.account)")
    if "associations" in settings.get("AccountingStorageEnforce", "").lower():
        text = f"{user} has no account, and this cluster requires one for each job"
        return failure("accounting", text, f"an administrator can add one: `sacctmgr add user {user} account=…`")
    return ok("accounting", f"answers; {user} has no account, and none is required")


def partition_checks(found: SlurmFacts) -> list[Check]:
    """Describe the partitions, the default first, and report those to which Slurm sends no jobs."""
    if not found.reached:
        return []
    if found.partitions is None:
        return [warning("partitions", "scontrol or sinfo did not list them", _START_IT)]
    if not found.partitions:
        return [failure("partitions", "none: no job can start", _START_IT)]
    ordered = sorted(found.partitions, key=lambda partition: not _is_default(partition))
    checks = [_partition(partition) for partition in ordered[:SHOWN_PARTITIONS]]
    others = [partition.name for partition in ordered[SHOWN_PARTITIONS:]]
    if others:
        checks.append(ok("more", f"{len(others)} partitions: {few(others, 10)}"))
    if not any(_is_default(partition) for partition in found.partitions):
        checks.append(note("default", "no partition is the default: set cluster.partition"))
    topology = found.settings.get("TopologyPlugin", "unknown")
    if topology == "topology/block":
        topology += ": cluster.sbatch.segment=N keeps groups of N nodes in one block each"
    return [*checks, ok("topology", topology)]


def _is_default(partition: Partition) -> bool:
    return partition.facts.get("Default") == "YES"


def _partition(partition: Partition) -> Check:
    total = count_nodes(partition.nodes)
    up = count_nodes([group for group in partition.nodes if group.usable])
    parts = [plural(total, "node") if up == total else f"{up} of {total} nodes up"]
    if partition.nodes:
        parts.append(f"{_hardware(partition)} each")
    parts.append(_limits(partition))
    text = "; ".join(parts)
    if _is_default(partition):
        text += " (default)"
    state = partition.facts.get("State", "UP")
    if state != "UP":
        fix = f"jobs wait until it is up again (`scontrol show partition {partition.name}`)"
        return note(partition.name, f"{state}; {text}", fix)
    if not up:
        return warning(partition.name, f"no node accepts jobs; {text}", f"reasons: `sinfo -R -p {partition.name}`")
    return ok(partition.name, text)


def _hardware(partition: Partition) -> str:
    """Return the hardware of a node: `64 cores, 256-512 GiB, 4 GPUs`."""
    groups = partition.nodes
    cores = _span([group.cpus for group in groups])
    memory = _span([round(group.memory_mb / 1024) for group in groups])
    gpus = _span([group.gpus for group in groups])
    text = f"{cores} cores, {memory} GiB"
    if gpus != "0":
        text += f", {gpus} GPUs"
    return text


def _limits(partition: Partition) -> str:
    """Return the limits of a job: `at most 1-00:00:00, 8 nodes a job, accounts physics only`."""
    max_time = partition.facts.get("MaxTime", "UNLIMITED")
    limits = [f"at most {max_time}"]
    if max_time in ("UNLIMITED", "INFINITE"):
        limits = ["no time limit"]
    max_nodes = partition.limit("MaxNodes")
    if max_nodes is not None:
        limits.append(f"{max_nodes} nodes a job")
    for kind in ("Accounts", "Qos", "Groups"):
        allowed = partition.allowed(kind)
        if allowed is not None:
            limits.append(f"{kind.lower()} {few(list(allowed), 3)} only")
    return ", ".join(limits)


def _span(values: list[int]) -> str:
    """Return `8`, or `4-8` for different values."""
    lowest, highest = min(values), max(values)
    if lowest == highest:
        return str(lowest)
    return f"{lowest}-{highest}"


def job_end_checks(found: SlurmFacts) -> list[Check]:
    """Explain how long ranks may save a checkpoint at the end of a job, and whether Slurm requeues the run."""
    if not found.reached:
        return []
    settings = found.settings
    kill_wait = parse_seconds(settings.get("KillWait", "")) or 0
    text = f"`scancel` sends SIGTERM, and SIGKILL {kill_wait} s later (KillWait)"
    checks = [ok("job ends", f"{text}; a run saves a checkpoint before its time limit (cluster.signal_lead_s)")]
    if settings.get("PreemptType", "preempt/none") not in ("preempt/none", "(null)"):
        partitions: dict[tuple[str, int], list[str]] = {}  #: by mode and grace time
        for partition in found.partitions or []:
            mode = partition.facts.get("PreemptMode", settings.get("PreemptMode", "")).split(",")[-1]
            grace_s = parse_seconds(partition.facts.get("GraceTime", "0")) or 0
            partitions.setdefault((mode, grace_s), []).append(partition.name)
        checks += [_preempted(mode, grace_s, kill_wait, names) for (mode, grace_s), names in partitions.items()]
    return checks


def _preempted(mode: str, grace: int, kill_wait: int, names: list[str]) -> Check:
    """Explain the preemption of jobs in partitions with the same mode and grace time, in seconds."""
    where = f"preempted in {few(names)}"
    if mode in ("OFF", "DISABLED"):
        return ok("preemption", f"jobs in {few(names)} are never preempted")
    if mode in ("SUSPEND", "GANG"):
        text = f"{where}: Slurm suspends the processes and resumes them later with their memory"
        fix = "set launch.hang_timeout_s above the usual pause, so that suspended ranks do not count as hung"
        return note("preemption", text, fix)
    total = grace + kill_wait
    then = "requeues the run"
    fixes = []
    if mode != "REQUEUE":
        then = "does not requeue the run (PreemptMode=CANCEL)"
        fixes.append("`hpcdist resume RUN` submits it again")
    if total < _SAVE_S:
        fixes.append(
            f"a step and a checkpoint must fit into {total} s, or the steps since the newest checkpoint are lost:"
            " set checkpoint.every_steps accordingly, or ask for a longer GraceTime"
        )
    text = f"{where}: SIGTERM, and SIGKILL {total} s later (GraceTime {grace} + KillWait {kill_wait}); Slurm {then}"
    level: Level = "note" if fixes else "ok"
    return Check(name="preemption", level=level, text=text, fix="; ".join(fixes))


GIB = 2**30
#: Each block is synced, so caches do not hide the speed.
_TEST_BYTES, _TEST_S = 32 * 2**20, 2.0
#: With a lower speed, a checkpoint of 1 GiB takes a minute or more.
_SLOW_BYTES_S = 16 * 2**20
_CHOOSE = "set HPCDIST_RUNS_DIR to another folder"


def folder_checks(runs_dir: Path, *, on_cluster: bool = False, in_container: bool = False) -> list[Check]:
    """Check the folder of runs without creating it: if it does not exist, its nearest existing parent is tested."""
    place = storage.existing(runs_dir.absolute())
    kind, source = storage.mount_of(place)
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        text = f"{place} is on a file system that is mounted read-only ({kind}): a run would fail at once"
        return [failure("runs", text, f"`mount | grep {kind}` shows why; {_CHOOSE}")]
    if not os.access(place, os.W_OK | os.X_OK) or not place.is_dir():
        text = f"{place} belongs to {user_of(place.stat().st_uid)} and cannot be written by user {os.getuid()}: a run"
        fix = _CHOOSE
        if in_container:
            fix = f"start the container with --user $(id -u):$(id -g); or {fix}"
        return [failure("runs", f"{text} would fail", fix)]
    text = f"{runs_dir.absolute()}"
    if not runs_dir.exists():
        text += " (the first run creates it)"
    checks = [ok("runs", text)]
    checks += _owner_checks(own_place(runs_dir) / DATABASE)
    if in_container and kind == "overlay" and is_in_container_layer(place):
        text = "in the container's own layer, which is deleted with the container"
        checks.append(warning("file system", text, f"mount a folder: -v $PWD/runs:{runs_dir.absolute()}"))
    else:
        checks.append(_shared(runs_dir, kind, source, on_cluster))
    found = storage.space(place)
    text = f"{found['free'] / GIB:.1f} GiB free of {found['total'] / GIB:.1f}"
    checks += list(space_checks({"folder": place, **found})) or [ok("disk", text)]
    # The tests of speed and locks write files.
    if not _has_failure(checks, "disk"):
        checks.append(_speed(place))
        if not _has_failure(checks, "writing"):
            checks.append(_locks(place))
    return checks


def _has_failure(checks: Sequence[Check], name: str) -> bool:
    return any(check.level == "failure" and check.name == name for check in checks)


def _owner_checks(database: Path) -> list[Check]:
    """Report a database in the folder of runs that other users may replace or open."""
    try:
        require_safe(database)
        mode = stat.S_IMODE(database.stat().st_mode) if database.exists() else 0
    except RunFolderError as error:
        text, _, fix = str(error).partition(": ")
        return [failure("owner", text, fix)]
    if not mode & (stat.S_IRWXG | stat.S_IRWXO):
        return []
    text = f"group or others may open {database} (mode {mode:04o}); the next run restricts it to its owner"
    return [warning("database", text, f"chmod 600 {shlex.quote(str(database))}")]


def is_in_container_layer(place: Path) -> bool:
    """Return whether a path is on the root file system, which in a container is the container's own layer."""
    return place.stat().st_dev == Path("/").stat().st_dev


def _locks(place: Path) -> Check:
    problem = storage.lock_problem(place)
    if problem:
        text = f"do not work ({problem}): sqlite's database and concurrent `hpcdist` commands need them"
        fix = "set another MLflow store (tracking.uri); Lustre: mount with -o flock; NFS: check rpc.statd"
        return warning("locks", text, fix)
    return ok("locks", "exclude other processes of this machine")


def _shared(runs_dir: Path, kind: str, source: str, on_cluster: bool) -> Check:
    text = kind or "of unknown type"
    if source and source != kind:
        text += f" ({source})"
    if kind not in storage.LOCAL:
        seen = "other machines may see it" if kind else "unknown whether other machines see it"
        return ok("file system", f"{text}: {seen}")
    if not on_cluster:
        return ok("file system", f"{text}, of this machine")
    is_private = any(runs_dir.resolve().is_relative_to(place) for place in storage.PRIVATE)
    where = "each machine has its own" if is_private or kind in storage.IN_MEMORY else "of this machine"
    fix = "set HPCDIST_RUNS_DIR to a shared folder, unless the nodes see this one"
    return warning("file system", f"{text}, {where}: Slurm's nodes must see it", fix)


def _speed(place: Path) -> Check:
    try:
        speed = storage.write_speed(place, _TEST_BYTES, _TEST_S)
    except OSError as error:
        text = f"a file of {_TEST_BYTES // 2**20} MiB could not be written ({error.strerror}): checkpoints would fail"
        fix = f"disk full, read-only, or quota exceeded (`quota -s`, `df -h {place}`); {_CHOOSE}"
        return failure("writing", text, fix)
    text = f"{speed / 2**20:.0f} MiB/s with each block synced"
    if speed < _SLOW_BYTES_S:
        fix = "save less often (checkpoint.every_steps), or use a faster file system"
        return note("writing", f"{text}: a checkpoint of 1 GiB takes a minute or more", fix)
    return ok("writing", text)


#: A server on the same continent answers faster.
SERVER_TIMEOUT_S = 3.0
_LATER = "training continues, and `hpcdist sync` delivers its metrics later"


def version_of(distribution: str) -> str:
    """Return the version of an installed package; empty if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def store_checks(uri: str, env: Mapping[str, str]) -> list[Check]:
    """Check whether a run's metrics would arrive in the store; nothing is created."""
    shown = redact_text(uri)
    checks = [ok("client", f"MLflow {version_of('mlflow')}")]
    if not version_of("mlflow"):
        checks = [warning("client", f"mlflow is not installed; {_LATER}", "`pip install mlflow`")]
    database = sqlite_path(uri)
    if database is not None:
        return [*checks, _sqlite(shown, database)]
    if uri.startswith(("http://", "https://")):
        return [*checks, _server(uri, env)]
    if "://" not in uri or uri.startswith("file:"):
        text = f"{shown} is a file store, which MLflow does not support since 3.13: {_LATER}"
        fix = "unset MLFLOW_TRACKING_URI for a database in the folder of runs, or set a server or sqlite:////path/mlflow.db"
        return [*checks, warning("store", text, fix)]
    return [*checks, note("store", f"{shown}: doctor cannot check this kind of store")]


def _server(uri: str, env: Mapping[str, str]) -> Check:
    try:
        credentials = read_credentials(uri, env)
    except UserMistake as mistake:
        return warning("server", str(mistake))
    root = web_address(uri)
    headers = credentials.headers()
    shown = redact_text(uri)
    is_up = False
    try:
        _get(f"{root}/health", {})
        is_up = True
        _get(f"{root}/api/2.0/mlflow/experiments/search?max_results=1", headers)
        version = version_in(_get(f"{root}/version", headers)) or "of an unknown version"
    except (OSError, ValueError, HTTPException) as error:  # also an invalid address of a redirect, or no HTTP
        return _server_problem(error, shown, credentials, is_up=is_up)
    return ok("server", f"{shown} answers, MLflow {version}")


def _server_problem(error: Exception, shown: str, credentials: Credentials, *, is_up: bool) -> Check:
    """Explain a failed request to a server.

    Args:
        shown: URI of the server without its password.
        is_up: whether the server has answered at `/health`.
    """
    code = error.code if isinstance(error, urllib.error.HTTPError) else None
    if code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        if not (credentials.user or credentials.token):
            text = f"{shown} requires a user and a password (answer {code}): {_LATER}"
            return warning("server", text, f"export {VARIABLES}")
        who = credentials.user or "the token"
        return warning("server", f"{shown} refuses {who} (answer {code}): {_LATER}", f"check {credentials.source}")
    if code:
        reason = f"answer {code}"
    else:
        words = " ".join(str(getattr(error, "reason", error)).split())
        reason = shortened(words or type(error).__name__, 200)
    if is_up:
        text = f"{shown} is up, but does not list experiments ({reason}): {_LATER}"
        return warning("server", text, "see the server's log, and its database")
    if code:
        text = f"{shown} answers {code}, so it is no MLflow server or has an error: {_LATER}"
        fix = f"`curl {shown}/health` should print OK; if MLflow has a path prefix, add it to the URI"
        return warning("server", text, fix)
    text = f"{shown} cannot be reached ({reason}): {_LATER}"
    fix = "start it, or set tracking.uri or MLFLOW_TRACKING_URI; behind a proxy set no_proxy"
    return warning("server", text, fix)


def _get(url: str, headers: Mapping[str, str]) -> str:
    request = urllib.request.Request(url, headers=dict(headers))  # noqa: S310 (http or https, by the caller)
    with urllib.request.urlopen(request, timeout=SERVER_TIMEOUT_S) as answer:  # noqa: S310
        return str(answer.read(10_000).decode(errors="replace"))


def _sqlite(uri: str, path: Path) -> Check:
    folder = storage.existing(path.parent)
    if not path.exists() and os.access(folder, os.W_OK):
        return ok("database", f"{path} does not exist; the first run creates it")
    if not os.access(path, os.W_OK) or not os.access(folder, os.W_OK):
        text = f"{path} or its folder cannot be written by this user: {_LATER}"
        fix = f"`ls -ld {folder} {path}`; set tracking.uri to a folder of your own"
        return warning("database", text, fix)
    try:
        # Not read-only: a killed process may have left a journal, which must be rolled back before a query.
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True)) as connection:
            connection.execute("select 1 from sqlite_master").fetchone()
    except sqlite3.Error as error:
        fix = "restore a backup, or set another store for new runs (tracking.uri)"
        return warning("database", f"{path} cannot be read ({error}): {_LATER}", fix)
    return ok("database", f"{uri} can be read")
