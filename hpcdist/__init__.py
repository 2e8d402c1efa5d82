"""hpcdist: one YAML file, one command, distributed PyTorch anywhere.

Public names: `Context` (the first argument of `train(ctx, cfg)`), `Config` and `load_config`; for scripts, `log`,
`should_stop`, `should_save`, `agree_among` and `checkpoint_dir`. Their first use imports them, so that `import hpcdist`
costs nothing; their types are in `__init__.pyi`.
"""

from typing import Any

__version__ = "0.1.0"
__all__ = [
    "Config",
    "Context",
    "__version__",
    "agree_among",
    "checkpoint_dir",
    "load_config",
    "log",
    "should_save",
    "should_stop",
]

#: The module that defines each public name.
_HOMES = {
    "Config": "hpcdist.config.schema",
    "Context": "hpcdist.rank.context",
    "agree_among": "hpcdist.rank.script_api",
    "checkpoint_dir": "hpcdist.rank.script_api",
    "load_config": "hpcdist.config.loading",
    "log": "hpcdist.rank.script_api",
    "should_save": "hpcdist.rank.script_api",
    "should_stop": "hpcdist.rank.script_api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hpcdist' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(_HOMES[name])
    return getattr(module, name)
