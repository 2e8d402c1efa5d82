"""Variables of the user's environment that reach ranks in containers by default: caches, proxies and certificates.

A path that such a variable names is mounted like `data.root`, unless a mount shows it already. If the path cannot be
shown, the variable is left out, because a library would fail at a path that the container does not have.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from hpcdist.containers.mounts import UNMOUNTABLE, Mount, without_nested

#: Names and patterns of the variables. Proxies have lower-case names, too.
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY")
_CERTIFICATES = (
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE",
    "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
)  # fmt: skip
FOR_LIBRARIES = (
    "HF_*", "HUGGINGFACE_HUB_*", "HUGGING_FACE_HUB_*", "TRANSFORMERS_*", "TORCH_HOME", *_PROXIES,
    *map(str.lower, _PROXIES), *_CERTIFICATES,
)  # fmt: skip
#: Folders of the system. Their content belongs to the image. Single files in them, such as certificates, do not.
_OF_THE_SYSTEM = tuple(map(Path, ("/bin", "/dev", "/etc", "/lib", "/proc", "/sbin", "/sys", "/usr")))


@dataclass(frozen=True, kw_only=True)
class Inherited:
    """The variables that a container inherits from the user's environment."""

    names: tuple[str, ...]
    mounts: tuple[Mount, ...]
    #: Names of the variables that the container does not get, by the reason.
    left_out: Mapping[str, tuple[str, ...]]

    @property
    def notes(self) -> list[str]:
        """One line for each reason to leave variables out."""
        return [f"the container does not get {', '.join(names)}: {why}" for why, names in self.left_out.items()]

    @property
    def lines(self) -> list[str]:
        """The names, and the notes, for display."""
        if not self.names:
            return self.notes
        return [f"the container gets {', '.join(self.names)} of your environment", *self.notes]


def inherited(env: Mapping[str, str], explicit: Collection[str], shown: Iterable[Mount]) -> Inherited:
    """Return the variables of `env` that a container inherits.

    Args:
        explicit: names that the config sets or passes; the user is responsible for their paths.
        shown: the other mounts of the container.
    """
    others = tuple(shown)
    names = []
    mounts = []
    left_out: dict[str, tuple[str, ...]] = {}
    for name in sorted(env):
        is_for_libraries = any(fnmatchcase(name, pattern) for pattern in FOR_LIBRARIES)
        if not is_for_libraries or name in explicit:
            continue
        mount = None
        if env[name].startswith("/"):
            mount = _mount_of(Path(env[name]), name)
            why = _why_not(mount, others, env.get("HOME", ""))
            if why:
                left_out[why] = (*left_out.get(why, ()), name)
                continue
        names.append(name)
        if mount is not None and not _is_shown(mount, others):
            mounts.append(mount)
    return Inherited(names=tuple(names), mounts=without_nested(mounts), left_out=left_out)


def _mount_of(path: Path, name: str) -> Mount:
    is_certificate = name in _CERTIFICATES
    return Mount(source=str(path), target=str(path), read_only=is_certificate)


def _is_shown(mount: Mount, others: Iterable[Mount]) -> bool:
    """Return whether the container has a path already, in any mode and perhaps from another source."""
    return any(Path(mount.target).is_relative_to(other.target) for other in others)


def _why_not(mount: Mount, others: Iterable[Mount], home: str) -> str:
    """Return why a container cannot show a path of this machine; empty if it can."""
    path = Path(mount.source)
    if _is_shown(mount, others):
        return ""
    if set(UNMOUNTABLE) & set(mount.source):
        return f"runtimes cannot mount {path}"
    if not path.exists():
        return f"{path} does not exist here"
    if path.is_dir() and any(path.is_relative_to(folder) for folder in _OF_THE_SYSTEM):
        return f"{path} is a folder of the system, and the image has its own"
    if home and Path(home).is_relative_to(path):
        return f"the dotfiles in {path} would replace settings of the image"
    return ""
