import pathlib
import re
import subprocess

R = {
    "still_ranks": "hung_ranks",
    "mend": "repair_trainer",
    "why_not": "missing_requirement",
    "ALONE": "SINGLE_RANK",
    "STOP_WHEN_ASKED": "STOP_ON_REQUEST",
    "OBEY": "STOP_ON_SIGNAL",
    "supervise_on_any_disk": "supervise_unchecked",
    "HELD": "HOLD_OVERRIDES",
    "HOLD_AT": "HOLD_STEP",
    "wait_held": "wait_until_held",
    "assert_as_undisturbed": "assert_equals_control",
    "assert_same": "assert_states_equal",
    "closed_port": "unused_port",
    "ready_database": "empty_database",
    "plain_control": "control_run",
    "augmented_control": "augmented_control_run",
    "wait_gone": "wait_until_ended",
    "quiet_env": "rank_env",
    "STRANGER": "UNKNOWN_UID",
    "runs_of_strangers": "runs_of_other_users",
    "EXACT": "TRAINING_METRICS",
}
skip = {"tests/unit/formats"}
subprocess.run(["git", "mv", "tests/support/still_ranks.py", "tests/support/hung_ranks.py"], check=True)
subprocess.run(["git", "mv", "tests/support/swept.py", "tests/support/sweep_results.py"], check=True)
n = 0
for p in [*pathlib.Path("tests").rglob("*.py"), pathlib.Path("Makefile"), pathlib.Path("CONTRIBUTING.md")]:
    s = o = p.read_text()
    for a, b in R.items():
        s = re.sub(rf"\b{a}\b", b, s)
    s = re.sub(r"\bfrom swept import\b", "from sweep_results import", s)
    if p.parts[-1] in ("named_pipe.py", "test_local_launcher.py", "test_supervisor.py"):
        s = re.sub(r"\bhas_ended\b", "is_released", s)
    if s != o:
        p.write_text(s)
        n += 1
print(n)
