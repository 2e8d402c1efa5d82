"""ConfigError has one line for each mistake: key, value, expectation and fix."""

from pathlib import Path

import pytest
from config_files import Write, problems

from hpcdist.config.document import MAX_BYTES, shipped_configs
from hpcdist.config.loading import load_config, load_run_config
from hpcdist.config.written import to_yaml
from hpcdist.errors import ConfigError, shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # An unknown key suggests the nearest one, at any level.
        ("lr: 1", "lr is not a key: did you mean 'optim.lr'?"),
        ('"\\u200bseed": 1', "'\\u200bseed' is not a key: did you mean 'seed'?"),
        ("modl: x", "modl is not a key: did you mean 'model'?"),
        ("modle: {name: x}", "modle.name is not a key: did you mean 'model.name'?"),
        ("launch: {hang_timeout: 1}", "launch.hang_timeout is not a key: did you mean 'launch.hang_timeout_s'?"),
        ("seed: {x: 1}", "seed.x is not a key: did you mean 'seed'?"),
        ("qqqqqq: 1", "qqqqqq is not a key: `hpcdist config --schema` lists all keys"),
        # Wrong types.
        ("seed: abc", "seed must be int, got 'abc'"),
        ("optim: {lr: true}", "optim.lr must be float, got True"),
        ("data: {batch_size: 3.5}", "data.batch_size must be int, got 3.5"),
        ("optim: {name: sgdd}", "optim.name must be one of adam, adamw, sgd, got 'sgdd'"),
        ("optim: 3", "optim is a section: give it keys, got 3"),
        ("optim: null", "optim is a section: give it keys, got None"),
        ("trainer: {script: train.py --lr 0.1}",
         "trainer.script must be list[str], got 'train.py --lr 0.1': write [train.py, --lr, 0.1]"),
        ("trainer: train.py", "trainer.target is a trainer; for a script write trainer: {script: [train.py]}"),
        ("trainer: {script: [-m]}", "trainer.script needs a module after -m, as in [-m, package.module], got ''"),
        ("params: 3", "params must be dict[str, Any], got 3"),
        ("launch: {env: {X: null}}",
         """launch.env.X must be str, got None: write '' for an empty string ("''" in a shell)"""),
        ("launch: {env: {X: [1]}}", "launch.env.X must be str, got [1]"),
        # Values out of range.
        ("launch: {num_ranks: 1000000000000}", "launch.num_ranks must be <= 1024, got 1000000000000"),
        ("cluster: {roles: {trainer: {nodes: 300000}}}", "cluster.roles.trainer.nodes must be <= 262144, got 300000"),
        ("seed: -1", "seed must be >= 0, got -1"),
        ("optim: {lr: .nan}", "optim.lr must be > 0, got nan"),
        ("checkpoint: {keep_last: 1}", "checkpoint.keep_last must be >= 2, got 1"),
        ("experiment: a/b", "experiment must be a plain folder name (letters, digits, '.', '_', '-'), got 'a/b'"),
        ("experiment: ''", "experiment must not be empty"),
        ("tracking: {stdout_metrics: {loss: 'loss ('}}",
         "tracking.stdout_metrics.loss: 'loss (' is not a regular expression: missing ), unterminated subpattern at"
         " position 5"),
        ("tracking: {stdout_metrics: {loss: '(?P<step>[0-9]+) loss'}}",
         "tracking.stdout_metrics.loss: '(?P<step>[0-9]+) loss' has no group for the value: put the number in"
         " parentheses, as in 'loss ([0-9.]+)'"),
        ("trainer: 'a b:c'", "trainer.target must look like package.module:function, got 'a b:c'"),
        # Interpolations.
        ("params: {x: '${nope}'}", "params.x: Interpolation key 'nope' not found"),
        ("name: ${nope}", "name: Interpolation key 'nope' not found"),
        ("params: {x: '${oc.env:NO_SUCH}'}", "params.x: KeyError raised while resolving interpolation"),
        # Values that are no values of YAML or of this key.
        ("seed: " + "9" * 30, "seed must fit in 64 bits, got 999999999999999999999999999999"),
        ("params: {1: a, '1': b}", "found duplicate key 1"),
        ("params: {a: !!bool x}", "line 1: explicit tags are not supported: put a value"),
        ('params: {a: "x\\0y"}', "params.a must not contain a NUL character, got 'x\\x00y'"),
        ("params: {a: '${'}", "params.a: malformed interpolation"),
        ("roles: {a: {b: 1}}", "roles.a must be int, got {'b': 1}"),
        ("hybrid: {hidden_sizes: [[1]]}", "hybrid.hidden_sizes.0 must be int, got [1]"),
        ("seed: ${seed}", "seed: Recursive interpolation detected"),
        ("comm: {max_bytes: " + "9" * 99 + "G}", "comm.max_bytes: '" + "9" * 99 + "G' is not a number of bytes"),
        ("model: {name: resnet81}", "model.name 'resnet81' is not known: did you mean 'resnet18'?"),
        # Keys that exclude each other.
        ("trainer: {target: 'a:b', script: [x.py]}",
         "trainer.script and trainer.target exclude each other: remove one of them"),
        ("{launch: {device: cpu}, precision: {dtype: fp16}}",
         "precision.dtype=fp16 needs a GPU, but launch.device=cpu: use precision.dtype=bf16"),
        # Roles.
        ("roles: {a-b: 1}", "roles: 'a-b' is not a valid role name: use letters, digits and '_', starting with a"),
        ("roles: {a: 0}", "roles.a must be >= 1, got 0"),
        ("cluster: {roles: {worker: {nodes: 2}}}", "cluster.roles.worker: no such role, `roles` has trainer"),
        ("{roles: {a: 1}, launch: {devices: {b: cpu}}}", "launch.devices.b: no such role, `roles` has a"),
        ("launch: {devices: {trainer: gpu}}", "launch.devices.trainer must be auto, cpu, cuda or xpu, got 'gpu'"),
        ("cluster: {roles: {trainer: {nodez: 2}}}", "cluster.roles.trainer.nodez is not a key: did you mean 'cluster"),
        ("cluster: {roles: {trainer: {nodes: x}}}", "cluster.roles.trainer.nodes must be int | None, got 'x'"),
        ("cluster: {roles: {trainer: {nodes: 2}}}", "cluster.roles.trainer: `roles` is empty: set its number of ranks"),
        ("cluster: {roles: {trainer: 2}}", "cluster.roles.trainer is a section: give it keys, got 2"),
        ("cluster: {roles: {trainer: {nodes: 0}}}", "cluster.roles.trainer.nodes must be >= 1, got 0"),
        # Numbers of nodes.
        ("cluster: {nodes: 8-2}", "cluster.min_nodes must be at most nodes=2, got 8"),
        ("cluster: {nodes: 0-2}", "cluster.min_nodes must be >= 1, got 0"),
        *(
            (
                f"cluster: {{price_per_core_hour: {price!r}}}",
                "cluster.price_per_core_hour must be one price with its currency, such as '2.50 EUR' or '$2.50', got"
                f" {price!r}",
            )
            for price in ("2.5", "EUR", "2,50 EUR", "1 EUR or 2 USD", "-1 EUR")
        ),
        ("cluster: {co2_g_per_kwh: -1}", "cluster.co2_g_per_kwh must be >= 0, got -1.0"),
        *(
            (
                f"cluster: {{gpus_per_node: {value}}}",
                f"cluster.gpus_per_node must be a number, or TYPE:NUMBER such as a100:4 without spaces, got {got}",
            )
            for value, got in (
                ("gpu:a100:4", "'gpu:a100:4'"),
                ("gpu:4", "'gpu:4'"),
                ("a100", "'a100'"),
                ("'a100:'", "{'a100': None}"),
                ("'a100:2,h100:2'", "'a100:2,h100:2'"),
                ("{a100: 4}", "{'a100': 4}"),
            )
        ),
        ("cluster: {roles: {trainer: {gpus_per_node: 'a100:4'}}}",
         "cluster.roles.trainer.gpus_per_node must be int | None, got 'a100:4'"),
        ("cluster: {gpus_per_node: a100:1025}", "cluster.gpus_per_node must be <= 1024, got 1025"),
        ("cluster: {gpu_type: 'a100,h100'}", "cluster.gpu_type must be one type such as a100, got 'a100,h100': `sinfo"),
        ("cluster: {roles: {trainer: {gpu_type: a100}}}", "cluster.roles.trainer.gpu_type was removed: all roles"),
        ("cluster: {nodes: 2 to 8}", "cluster.nodes must be int, got '2 to 8'"),
        # Containers and environments.
        ("container: {runtime: apptainer}", "container.image must name the image to start"),
        ("container: {runtime: singularity, image: a}", "container.runtime must be one of none, apptainer, enroot, py"),
        ("container: {runtime: apptainer, image: a, mounts: [data]}",
         "container.mounts must be SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro with absolute paths, got 'data'"),
        ("container: {env: [TOKEN=abc]}",
         "container.env must hold names such as WANDB_MODE or UCX_*, never values, got"),
        ("{container: {runtime: apptainer, image: a}, cluster: {environment: {kind: venv, path: /a}}}",
         "cluster.environment.kind=venv and container.runtime=apptainer exclude each other: set one of them to none"),
        ("model: {init_from_skip: [fc.*]}", "model.init_from_skip needs init_from: set it, or remove init_from_skip"),
        ("{model: {init_from: first}, trainer: {script: [train.py]}}",
         "model.init_from is not for scripts, which load their weights themselves: remove it"),
        # Elastic runs.
        ("elastic: {exact: true}", "elastic.exact needs data.global_batch_size: set it"),
        ("elastic: {micro_batches: 4}", "elastic.micro_batches needs data.global_batch_size"),
        ("launch: {fit_batch: true}", "launch.fit_batch=true needs an elastic run: set"),
        *(
            (f"{{data: {{global_batch_size: {size}}}, {more}}}", expected)
            for size, more, expected in (
                (8, "trainer: {script: [train.py]}",
                 "data.global_batch_size is not for scripts, which divide their batches themselves: remove it"),
                (8, "trainer: comm", "data.global_batch_size is not for trainer comm: remove it"),
                (8, "trainer: 'mine:train', roles: {a: 1, b: 1}", "roles and data.global_batch_size"),
                (8, "elastic: {micro_batches: 2}, launch: {num_ranks: 4}",
                 "elastic.micro_batches=2 is less than the 4 ranks of the config: raise it, or use fewer ranks"),
                (100, "elastic: {micro_batches: 8}, cluster: {nodes: 4, tasks_per_node: 2}",
                 "data.global_batch_size=100 cannot be divided into 8 equal micro-batches: use 96, or set"),
            )
        ),
        *(
            (f"cluster: {{environment: {{{environment}}}}}", f"cluster.environment.{expected}")
            for environment, expected in (
                ("kind: venv", "path must name a virtual environment for kind=venv"),
                ("kind: module", "modules must name the modules that contain Python for kind=module"),
                ("kind: module, modules: ['']", "modules must hold names such as cuda/13.0, got ''"),
                ("modules: [a]", "modules are not loaded with kind=none: set kind, or use cluster.setup"),
                ('kind: venv, path: "/a\\nb"', r"path must be one line without control characters, got '/a\nb'"),
            )
        ),
    ],
)  # fmt: skip
def test_mistake_names_key_value_expectation_and_fix(write: Write, text: str, expected: str) -> None:
    (problem,) = problems(write(text))
    assert problem.startswith(expected)


def test_all_mistakes_of_a_file_are_reported_at_once(write: Write) -> None:
    text = """
        seed: x
        experiment: a/b
        optim: {lrr: 1, name: sgdd, momentum: -1}
        data: {batch_size: 0, num_classes: 1}
        launch: {env: {X: null}}
        unknown: {a: 1}
        params: {x: "${nope}"}
    """
    found = problems(write(text), "checkpoint.keep_last=0", "no-equals-sign", "optim.weight_decay=abc")
    lines = [line.removeprefix("command line: ") for line in found]
    keys = "seed experiment optim.lrr optim.name optim.momentum data.batch_size data.num_classes launch.env.X unknown.a"
    keys += " params.x checkpoint.keep_last 'no-equals-sign' optim.weight_decay"
    for key in keys.split():
        assert [line for line in lines if line.startswith((f"{key} ", f"{key}:"))], key
    assert len(found) == 13


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.root=", """data.root must be str, got None: write '' for an empty string ("''" in a shell)"""),
        ("optim={lr: -1}", "optim.lr must be > 0, got -1.0"),
        ("launch.env.a b=1", "launch.env: 'a b' is not a valid variable name: use letters, digits and '_', not"),
        ("cluster.roles.x.nodes=2", "cluster.roles.x: no such role, `roles` has trainer"),
        ("seed=${optim.name}", "seed must be int, got 'adam'"),
        ("experiment=!!bool x", "experiment must be a plain folder name"),
        ("seed=" + "9" * 5000, "seed must be int, got '999"),
        ("params.a=\udcff", "params.a must be UTF-8 text, got '\\udcff'"),
        ("params.\udcff=1", "params: a key must be UTF-8 text, got '\\udcff'"),
        (r"params=\${x}", "params must be dict[str, Any], got '${x}'"),
        ("runs_dir=***", "runs_dir: *** stands for a redacted secret: write the value, or ${oc.env:NAME}"),
        ("launch.device.x=1", "launch.device.x: a part of this path is a value already, not a section"),
        *(
            (f"tracking.uri={uri}", "tracking.uri has no valid host and port: expected such as http://host:5000")
            for uri in ("http://[x", "http://x:99999999", "https://:5000")
        ),
        ("notify.webhook=https://ada:secret@[x", "notify.webhook has no valid host and port: expected such as http"),
        *(
            (word, f"{word!r} is not an override: write key=value, as in optim.lr=0.01")
            for word in ("optim.lr", "=3", "")
        ),
        *(
            (f"{key}={value}", f"{key}: the home folder of '~nosuchuser' is unknown: use an absolute path")
            for key, value in (
                *((key, "~nosuchuser/x") for key in ("runs_dir", "data.root", "hybrid.file")),
                *((key, "[~nosuchuser/x:/x]") for key in ("rnn.files", "trainer.script", "container.mounts")),
                ("tracking.uri", "sqlite:///~nosuchuser/x"),
            )
        ),
    ],
)
def test_mistake_of_an_override_names_the_command_line(write: Write, override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write("launch: {device: cpu}"), [override])
    assert str(caught.value).startswith(f"command line: {expected}")


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("seed: x", ["optim.lr=1"], ["seed must be int, got 'x'"]),
        ("lunch: {device: cpu}", ["launch.device=cpu"], ["lunch.device is not a key: did you mean 'launch.device'?"]),
        # The override corrects a mistake that hid another one.
        ("{seed: x, precision: {dtype: fp16}, launch: {device: cpu}}", ["seed=1"],
         ["precision.dtype=fp16 needs a GPU, but launch.device=cpu"]),
        ("optim: 3", ["optim.lr=1"],
         ["command line: optim.lr: a part of this path is a value already", "optim is a section: give it keys"]),
        ("seed: -1", ["optim.lr=-1"], ["command line: optim.lr must be >", "seed must be >= 0, got -1"]),
    ],
)  # fmt: skip
def test_mistake_of_a_file_names_the_file_whatever_the_overrides(
    write: Write, text: str, overrides: list[str], expected: list[str]
) -> None:
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert caught.value.source == str(path)
    for problem, beginning in zip(caught.value.problems, expected, strict=True):
        assert problem.startswith(beginning)


@pytest.mark.parametrize(
    ("profile", "text", "overrides", "expected"),
    [
        ("nodes: 0", "", [], "{site}: cluster.nodes must be"),
        ("container: {runtime: dockr}", "", [], "{site}: container.runtime must be one of none, apptainer,"),
        ("container: podman", "", [], "{site}: container is a section"),
        ("partiton: gpu", "", [], "{site}: cluster.partiton is not a key: did you mean 'cluster.partition'?"),
        ("nodes: 0", "cluster: {nodes: 1, time_limit: -1}", [], "{path}: cluster.time_limit"),
        ("nodes: 0", "", ["cluster.nodes=-1"], "command line: cluster.nodes must be"),
        ("nodes: 2", "", ["cluster.nodes=8-2"], "command line: cluster.min_nodes must be at most nodes=2"),
        ("nodes: 0", "seed: -1", ["optim.lr=-1"],
         "{path}: 3 mistakes\n  - {site}: cluster.nodes must be >= 1, got 0\n  - command line: optim.lr must be >"),
        ("nodes: 2", "container: podman", [], "{path}: container is a section"),
        ("", "{precision: {dtype: fp16}, launch: {num_ranks: 2}}", ["launch.device=cpu"],
         "command line: precision.dtype=fp16 needs a GPU, but"),
        ("- a", "", [], "{site}: must hold keys and values, but its top level is of type list"),
    ],
)  # fmt: skip
def test_mistake_of_a_site_profile_names_the_profile(
    write: Write, tmp_path: Path, profile: str, text: str, overrides: list[str], expected: str
) -> None:
    path, site = write(text), tmp_path / "site.yaml"
    site.write_text(profile)
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, cluster=site)
    assert str(caught.value).startswith(expected.format(path=path, site=site))


def test_mistakes_of_a_stored_config_and_its_overrides(write: Write, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    text = to_yaml(load_config(write("")))
    for before, after, problem in (
        ("", "", "command line: optim.lr must be > 0, got -1.0"),
        (
            "seed: 0\n",
            "seed: 0\nsed: 1\n",
            "- sed is not a key: did you mean 'seed'?\n  - command line: optim.lr must be >",
        ),
        ("lr: 0.001", "lr: fast", "optim.lr must be float, got 'fast'"),
        ("seed: 0\n", "seed: 0\nseed: 1\n", "found duplicate key seed"),
        ("seed: 0\n", "seed: true\nmodell: {}\n", "modell is not a key: did you mean 'model'?"),
        ("target: ddp\n  script: []", "target: own:train\n  script: [x]", "trainer.script and trainer.target exclude"),
        ("name: simple_cnn", "name: resnet17", "model.name"),
    ):
        path.write_text(text.replace(before, after, 1))
        with pytest.raises(ConfigError) as caught:
            load_run_config(path, ["optim.lr=-1"] if "optim.lr must be >" in problem else [], {})
        assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed: 1\noptim:\n  lr: 1\n  lr: 2\n", ["found duplicate key lr", "line 4"]),
        ("seed: 1\noptim: [1\nname: x\n", ["did not find expected ',' or ']'", "line 3"]),
        ("- a\n- b\n", ["must hold keys and values, but its top level is of type list"]),
        ("5\n", ["must hold keys and values, but its top level is of type int"]),
        ("name: gr\udcf6\udcdfe", ["is not UTF-8 text"]),
        ("#" * (MAX_BYTES + 1), [f"cannot be read: {MAX_BYTES + 1} bytes, more than {MAX_BYTES}"]),
    ],
    ids=["duplicate", "syntax", "list", "number", "latin-1", "size"],
)
def test_file_that_is_not_yaml_with_keys_is_rejected(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    (problem,) = problems(path)
    assert all(word in problem for word in words)
    assert "\n" not in problem


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("ddp_digit", "did you mean 'ddp_digits'?"),
        ("/no/such/run.yaml", f"shipped configs are {', '.join(shipped_configs())}"),
    ],
)
def test_missing_file_suggests_a_shipped_config(source: str, hint: str) -> None:
    with pytest.raises(ConfigError, match="no such config file") as caught:
        load_config(source)
    assert str(caught.value) == f"{source}: no such config file: {hint}"
    with pytest.raises(ConfigError, match=r"config.yaml: no such file$"):
        load_run_config(Path(source, "config.yaml"), [], {})


@pytest.mark.parametrize("source", ["tiny.yml", "tiny", "Tiny.yaml", "tinny.yaml", "./tiny.yml", "~/tiny.yml"])
def test_missing_file_suggests_the_file_beside_it(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "tiny.yaml").touch()
    expected = f"{tmp_path}/tiny.yaml" if source.startswith("~") else "tiny.yaml"
    for options in ({}, {"cluster": source}):
        with pytest.raises(ConfigError) as caught:
            load_config("ddp_digits" if options else source, **options)
        assert str(caught.value).endswith(f"no such config file: did you mean {expected!r}?")


# --- Malformed YAML ends in a ConfigError of bounded length.


def test_deep_and_recursive_documents_are_rejected(write: Write) -> None:
    for text in ("[" * 50_000, "{a: " * 50_000, "- " * 50_000 + "a", "a: " + "[" * 41 + "]" * 41):
        (problem,) = problems(write(text))
        # libyaml has a limit of its own since PyYAML 6.0.4.
        assert problem == "line 1: nested more than 40 levels deep" or "maximum nesting depth" in problem
    (problem,) = problems(write(""), f"params{'.a' * 4000}=1")
    assert problem.endswith("nested more than 40 levels deep")
    for text in ("${a:" * 300 + "}" * 300, "${a:" + "[" * 300):
        (problem,) = problems(write(""), f"experiment={text}")
        assert problem == "experiment: malformed interpolation"
    links = "".join(f"  b{number}: &b{number} [*b{number - 1}]\n" for number in range(1, 60))
    for text in ("params: &a {b: *a}", f"params:\n  b0: &b0 [x]\n{links}"):
        (problem,) = problems(write(text))
        assert problem.endswith("40 levels deep, by aliases (`*`) of aliases or one that contains itself")


def test_escaped_interpolation_is_text(write: Write, tmp_path: Path) -> None:
    config = load_config(write(""), [r"trainer.target=\${x}", r"params.a=\${x}"])
    assert config.params["a"] == "${x}"
    written = tmp_path / "written.yaml"
    written.write_text(to_yaml(config))
    assert load_run_config(written, [], {}) == config


def test_invalid_file_names_are_rejected() -> None:
    for source in ("~nosuchuser/x", "x" * 5000, "a\0b", "\udcff"):
        with pytest.raises(ConfigError, match=r"cannot be a config file|no such config file") as caught:
            load_config(source)
        assert len(str(caught.value)) <= 500
        str(caught.value).encode()


def test_config_error_is_bounded_in_length(write: Write) -> None:
    path = write("".join(f"key{number}: 1\n" for number in range(25)))
    with pytest.raises(ConfigError) as caught:
        load_config(path, [f"seed={'x' * 9000}", "params.\x1b[31m.a=${nosuch:" + "y" * 9000])
    lines = str(caught.value).splitlines()
    assert len(caught.value.problems) == 27
    assert lines[0] == f"{path}: 27 mistakes"
    assert (len(lines), lines[-1]) == (22, "  - and 7 more")
    assert max(map(len, lines)) <= 500
    assert all(line.isprintable() for line in lines)


def test_long_secret_is_not_shown_in_part(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "s3cret" * 200
    monkeypatch.setenv("MY_KEY", secret)
    path = write(
        f"params: {{my_token: {secret}}}\noptim: {{lr: '${{oc.env:MY_KEY}}'}}\nstop: {{epochs_token: {secret}}}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path, [f"seed={secret}", f"launch.env={{A_TOKEN: [{secret}]}}"])
    assert "s3crets3cret" not in str(caught.value)


def test_shown_shortens_long_and_nested_values() -> None:
    assert shown("a" * 60) == repr("a" * 60)
    assert shown("a" * 5000) == "'" + "a" * 44 + "..." + "a" * 11 + "' (5,000 characters)"
    assert shown(10**5000) == "an integer of 16,610 bits"
    assert shown({"a": [1, {"b": [2, [3]]}]}) == "{'a': [1, {'b': [...]}]}"
    assert shown([["x" * 100] * 9] * 9).endswith(" (9 entries)")
